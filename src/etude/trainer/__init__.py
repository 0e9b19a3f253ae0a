"""Pretraining and the RL step: losses, advantages, packing, checkpoints.

    config.py       RLConfig, PretrainConfig, PhaseConfig; free of torch
    advantage.py    rewards of a group -> advantage of each member
    pack.py         groups -> samples -> packed rows
    objectives.py   off-policy corrections: per-token policy losses by name, and k1 as a reward
    losses.py       one row through the model: log-probs where needed, the loss of each stream
    mismatch.py     how far trainer and engine are apart, fresh and stale tokens told apart
    alarms.py       which of a step's numbers left their healthy range; free of torch
    rl.py           RLTrainer: groups in, one optimizer step, a new version out
    documents.py    tokenised documents on disk, and rows of them
    pretrain.py     pretraining in phases
    mtp.py          training the heads that predict further tokens; how often drafts would be accepted
    checkpoint.py   model/ and optim/ of a checkpoint, bit for bit
    provenance.py   base, licences, data, and the share of compute that was ours
    flops.py        counting operations

Import the modules by name (`from etude.trainer.rl import RLTrainer`).
"""
