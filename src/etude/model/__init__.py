"""The decoder shared by trainer and engine: one definition, one cache, one set of weights files.

    config.py        ModelConfig: the shape of a model, in our words
    transformer.py   Decoder: the forward over a flat list of tokens
    block.py         one layer
    mtp.py           heads that predict further tokens
    attention.py     attention through block tables, fast and batch-invariant
    moe.py           router (returns and replays its choices) and experts
    cache.py         Plan and PagedCache: which token is where
    rope.py          rotary position embedding
    linear.py        matmul, norm and padding whose bits do not depend on the batch
    latent.py        attention over cached latents (DeepSeek-V3)
    reference.py     the slow twin that tests compare with
    weights.py       Hugging Face folders in and out
    gguf.py          GGUF files in
    shelf.py         models by name: add, find, remove
    families/        names and config of each architecture on disk

Import the modules by name (`from etude.model.transformer import Decoder`).
"""
