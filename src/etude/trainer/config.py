"""What the trainers are told. Apart from the trainers so that reading a recipe does not import torch.

Choices the sources leave open carry their reason here (facts: Composer 2 report, arXiv 2603.24477, section 4).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from etude.config import config, live
from etude.errors import ConfigError
from etude.model.config import ModelConfig, Numerics, RopeScaling, RouteFilter, RouteRule
from etude.optim.config import OptimConfig
from etude.optim.schedules import ScheduleConfig

DType = Literal["float32", "bfloat16"]
Correction = Literal["truncated", "none", "masked_token", "masked_sequence", "masked_geometric", "ppo_clip", "clip_higher", "gspo", "cispo"]


@config
class AlarmConfig:
    """Healthy ranges of a step's monitors; `none` switches an alarm off. Each is a published trainer's rule of thumb (verl's
    documentation of its rollout correction; f2: arXiv 2510.11370), not a property of this policy: raise one that a good run crosses."""

    ess_min: float | None = live(0.3)
    """Effective sample size as a share of the tokens."""
    weight_mean_min: float | None = live(0.5)
    weight_mean_max: float | None = live(2.0)
    weight_std_max: float | None = live(1.0)
    mismatch_kl_max: float | None = live(0.1)
    """Size of the k1 estimate of KL(mu || pi)."""
    f2_max: float | None = live(0.1)
    """Share of tokens whose ratio is beyond 2 or 1/2."""
    engine_dlogp_mean_max: float | None = live(0.01)
    """Mean |delta log-prob| of tokens sampled by the very weights that are trained, where it can only be the engine's."""
    dlogp_mean_max: float | None = live(None)
    """The same over all tokens. Off: stale tokens differ because the policy learnt, and ess, weights and KL watch that."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"alarms.{field.name} is {value!r}; it should be none, zero or a positive number")


@config
class RLConfig:
    """One RL stage: objective, packing, numerics, optimizer."""

    lr: float = live(1e-4)
    """Peak step size. Tiny models take 1e-4 to 3e-4 and collapse at 1e-3 (measured on 1.9 M parameters); large ones 1e-6."""
    gain_lr: float = live(0.0)
    """Step size of the logarithm of the logits' scale, the policy's own temperature, on the same schedule (`rl.move_gain`). 0 leaves it to
    the optimizer. For short runs of small policies, which lose most of what they know to noise (docs/log.md)."""
    schedule: ScheduleConfig = ScheduleConfig()
    """Constant by default: an RL run has no known end. `warmup` counts steps, or is a share of `schedule_steps`."""
    schedule_steps: int = 0
    """Steps that the schedule is laid over; 0 is a run without an end. A run of the loop fills in loop.steps for cosine and wsd."""
    optim: OptimConfig = OptimConfig()
    objective: Correction = "truncated"
    """Off-policy correction by name; equations and sources in `objectives`, advice in docs/corrections.md."""
    cap: float = live(2.0)
    """Upper bound of the truncated importance weight; 2 is the usual token-level value."""
    mask_low: float = live(0.5)
    mask_high: float = live(2.0)
    """masked_*: ratios outside [low, high] lose their gradient. Of the token, the sequence, or its geometric mean, by the name."""
    clip_low: float = live(0.2)
    clip_high: float = live(0.28)
    """PPO clip range 1 - low .. 1 + high; the upper side wider, as in DAPO (arXiv 2503.14476). Equal values are PPO's own."""
    gspo_low: float = live(3e-4)
    gspo_high: float = live(4e-4)
    """GSPO's clip range, the paper's (arXiv 2507.18071). Narrow: an engine that differs from the trainer by more clips everything."""
    cispo_low: float = live(1.0)
    cispo_high: float = live(1.0)
    """CISPO's weight range 1 - low .. 1 + high: no lower bound as in the paper (arXiv 2506.13585), which does not give its upper one."""
    advantage: Literal["centred", "standardised"] = "centred"
    """reward - group mean (Dr. GRPO), or that divided by the group's standard deviation (GRPO), for comparison."""
    overlong: Literal["keep", "mask"] = "keep"
    """Rollouts that ran out of tokens or context: trained on like any other, or (ablation) left out of the loss."""
    silent: Literal["count", "drop"] = "count"
    """Groups whose rewards are all equal: counted in the normaliser (they are evidence of no preference), or left out of the step
    altogether, KL included (half of DAPO's dynamic sampling; the other half, further groups in their place, is `loop.refill`)."""
    normaliser: Literal["constant", "length", "tokens"] = "constant"
    """What a token's loss is divided by: C * rollouts (Dr. GRPO, arXiv 2503.20783: no length bias), rollouts * the rollout's own
    sampled tokens (GRPO, arXiv 2402.03300), or the sampled tokens of the step (DAPO, arXiv 2503.14476)."""
    loss_constant: float = 1024.0
    """C of the normaliser C * rollouts: the token sum is divided by it, never by a sequence's own length."""
    kl: float = live(1e-3)
    """Coefficient of k1 against the reference policy, as a per-token reward; 0 loads no reference and saves its forward."""
    kl_credit: Literal["token", "to_go"] = "token"
    """A token answers for its own k1 only (low variance), or for all k1 from it to the segment's end (the exact sequence gradient)."""
    balance: float = live(0.0)
    """Weight of the experts' load-balancing loss; 0 because replayed routes leave little to balance within a stage."""
    router_replay: bool = True
    """Mixture of experts: run the trainer's forward with the experts the engine used."""
    route_filter: RouteRule = "ratio"
    """Which recorded experts are replayed: all (none), or those the trainer's router finds plausible by ratio, margin or rank (see
    `RouteFilter`); it replaces the others by its own next best. Only routes of older weights differ enough to fail (docs/log.md)."""
    route_alpha: float = live(0.5)
    """ratio: gate at least this share of the smallest one the router would choose. Half lets every near tie pass."""
    route_margin: float = live(0.05)
    """margin: score at most this much below that of the last expert the router would choose."""
    route_slack: int = live(2)
    """rank: at most this many places behind the router's last choice."""
    skip_silent: bool = True
    """Leave groups whose rewards are all equal out of the forward when neither KL nor balance needs them; the gradient is the same."""
    row_tokens: int = 4096
    """Tokens of a packed row, at least the context window: a segment is never split."""
    numerics: Numerics = "fast"
    """fast | matched | invariant, as in the engine."""
    compute_dtype: DType = "float32"
    """Type the forward and backward run in; the optimizer's master weights are float32 whatever this is."""
    publish_dtype: DType = "bfloat16"
    """Type of published weights. The trainer's own forward uses these rounded values, so what trains is what serves."""
    device: str = "cpu"
    alarms: AlarmConfig = AlarmConfig()

    def __post_init__(self) -> None:
        if min(self.lr, self.gain_lr, self.kl, self.balance) < 0:
            found = (self.lr, self.gain_lr, self.kl, self.balance)
            raise ConfigError(f"lr, gain_lr, kl and balance must not be negative, got {found}")
        if self.cap < 1 or not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise ConfigError(f"cap >= 1, 0 < clip_low < 1 and clip_high > 0 are needed, got {self.cap}, {self.clip_low}, {self.clip_high}")
        if self.objective == "clip_higher" and self.clip_high <= self.clip_low:
            raise ConfigError(f"clip_higher needs clip_high > clip_low, got {self.clip_high} and {self.clip_low}; or use ppo_clip")
        if not 0 <= self.mask_low <= 1 <= self.mask_high:
            raise ConfigError(f"0 <= mask_low <= 1 <= mask_high is needed, got {self.mask_low}, {self.mask_high}")
        if not 0 < self.gspo_low < 1 or self.gspo_high <= 0 or not 0 < self.cispo_low <= 1 or self.cispo_high <= 0:
            found = (self.gspo_low, self.gspo_high, self.cispo_low, self.cispo_high)
            raise ConfigError(f"0 < gspo_low < 1, 0 < cispo_low <= 1 and positive upper sides are needed, got {found}")
        if self.loss_constant <= 0 or self.row_tokens < 1:
            raise ConfigError(f"loss_constant and row_tokens must be positive, got {self.loss_constant}, {self.row_tokens}")
        self.plausible()

    def plausible(self) -> RouteFilter:
        """The filter of replayed routes."""
        return RouteFilter(rule=self.route_filter, alpha=self.route_alpha, margin=self.route_margin, slack=self.route_slack)


@config
class PhaseConfig:
    """One phase of pretraining: bulk, longer context, or supervised fine-tuning."""

    name: str
    data: str
    """Folder or file of document shards (see `documents`)."""
    tokens: int
    """Token budget; the phase stops with the step that reaches it."""
    length: int
    """Context length; longer documents are cut into pieces of this many tokens."""
    batch_tokens: int = 32_768
    """Tokens of one optimizer step."""
    lr: float = 3e-3
    schedule: ScheduleConfig = ScheduleConfig(kind="wsd", warmup=0.02, decay=0.3)
    optim: OptimConfig = OptimConfig(kind="muon", weight_decay=0.1)
    trains: Literal["model", "heads", "all"] = "model"
    """The model, its heads for further tokens on top of the model as it is, or both side by side. The heads' loss never moves the
    model, so "all" trains the same model as "model"."""
    head_loss: Literal["distil", "labels"] = "distil"
    """What heads learn from: the model's own distribution (KL), since that is what accepts their drafts, or the text, for comparison."""
    rope_theta: float = 0.0
    """Base of the rotary embedding from this phase on; 0 keeps it. A phase of longer contexts needs slower waves: about theta times the
    growth of the context, or a `rope_scaling`."""
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies are stretched from this phase on; none keeps what was."""
    max_positions: int = 0
    """Longest context of the model from this phase on; 0 keeps it."""
    probe: str = ""
    """Document shards that show what this phase is for, never trained on. All phases' probes are read at the start of the run and at the
    end of every phase, each at its own phase's length: `probes` of curve.json says what a phase taught and what it cost the others."""

    def __post_init__(self) -> None:
        if min(self.tokens, self.length, self.batch_tokens) < 1:
            raise ConfigError(f"phase {self.name!r}: tokens, length and batch_tokens must be positive")
        if self.length < 2:
            raise ConfigError(f"phase {self.name!r}: length is {self.length}; predicting a token needs at least 2")
        if self.rope_theta < 0 or self.max_positions < 0:
            raise ConfigError(f"phase {self.name!r}: rope_theta and max_positions must not be negative (0 keeps what was)")


@config
class PretrainConfig:
    """A whole pretraining: a model's shape or a base to start from, and its phases in order."""

    phases: tuple[PhaseConfig, ...]
    model: ModelConfig | None = None
    """Shape of a model to start from random weights; give this or `base`."""
    base: str = ""
    """Model to start from: a name (`etude model ls`) or a folder."""
    add_heads: int = 0
    """Heads for further tokens to give to a base that has none; a model from a [model] table has its `mtp_layers`."""
    tokenizer: str = ""
    """Folder whose tokenizer files go into every checkpoint; the base's own when empty."""
    held_out: str = ""
    """Document shards never trained on; their loss is logged against log compute."""
    eval_every: int = 100
    """Steps between held-out evaluations; every phase also ends with one."""
    eval_tokens: int = 65_536
    """Tokens of the held-out shards used each time, always the same ones."""
    save_every: int = 500
    """Steps between checkpoints; the end of the run always has one."""
    stop_tokens: int = 0
    """End the run after this many tokens in total, whatever the phases say; 0: no such limit."""
    row_tokens: int = 4096
    """Tokens of one forward; raise it on a GPU."""
    router_bias_speed: float = 1e-3
    """Sigmoid routers: how far each expert's bias moves after a step, towards an even load (DeepSeek-V3's value). 0 holds it still."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 runs the forward under autocast; weights and optimizer stay float32."""
    save_dtype: DType = "bfloat16"
    """Type of the weights in checkpoints' model folders; the exact float32 ones are beside the optimizer."""
    compile: bool = False
    """torch.compile of the decoder; pays off on long GPU runs only."""
    device: str = "cpu"
    processes: int = 1
    """Data-parallel processes on this machine's CPU, each with the threads of the caller (see `ranks`)."""
    seed: int = 0
    licence: str = ""
    """Licence of the weights that come out, for the provenance record."""

    def __post_init__(self) -> None:
        if self.processes < 1 or (self.processes > 1 and self.device != "cpu"):
            raise ConfigError(f"processes = {self.processes} with device = {self.device!r}; several processes share a step on CPU only")
        if not 0 <= self.router_bias_speed < 1:
            raise ConfigError(f"router_bias_speed is {self.router_bias_speed}; gates lie between 0 and 1, and so should it: 0.001 is usual")
        if self.add_heads < 0 or (self.add_heads and not self.base):
            raise ConfigError(f"add_heads = {self.add_heads}; it adds heads to a base, a [model] table sets mtp_layers instead")
        if not self.phases:
            raise ConfigError("a pretraining needs at least one [[phases]] table")
        if (self.model is None) == (not self.base):
            raise ConfigError("give either a [model] table (random start) or base = 'folder', not both and not neither")
        longest = max(p.length for p in self.phases)
        if self.row_tokens < longest:
            raise ConfigError(f"row_tokens = {self.row_tokens} is less than the longest phase's length {longest}")
        names = [p.name for p in self.phases]
        if len(set(names)) != len(names):
            raise ConfigError(f"phases need different names, got {names}")
