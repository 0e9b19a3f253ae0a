"""The engine's slow twin: one request at a time, the whole context from scratch for every token.

No scheduler, no blocks that outlive a forward, no batch; the same model code and the same sampler. In invariant mode the
engine gives the same tokens and the same bits of every log-prob, whatever else it was doing (tests/inference/test_twins.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many

import numpy as np
import torch
from torch import Tensor

from etude.inference import sampler
from etude.inference.request import check_sampling
from etude.model.cache import PagedCache, Plan, blocks_for
from etude.model.transformer import Decoder, Output
from etude.protocols import GenerateRequest, Generation, Scored
from etude.records import Finish, Version


@torch.inference_mode()
def generate(model: Decoder, request: GenerateRequest, version: Version, *, block_size: int = 16) -> Generation:
    """What `NativeEngine.generate` must return for the same request, except for cached_tokens and seconds."""
    begin_s = time.monotonic()
    check_sampling(request.sampling, model.config.vocab_size)
    ids = list(request.ids)
    limit = min(len(ids) + request.sampling.max_tokens, model.config.max_positions)
    params = sampler.Params.empty(1)
    params.set(0, request.sampling)
    logprobs, logprobs_t1 = [], []
    finish = None
    while finish is None:
        output = _forward(model, ids, block_size)
        drawn = sampler.sample(model.logits(output.hidden_ND[-1:]), params, np.array([len(ids)]))
        ids.append(int(drawn.ids_R))
        logprobs.append(float(drawn.logprob_R))
        logprobs_t1.append(float(drawn.logprob_t1_R))
        if ids[-1] in request.sampling.stop_ids:
            finish = Finish.STOP
        elif len(ids) >= limit:
            finish = Finish.LENGTH
    return Generation(
        id=request.id,
        ids=tuple(ids[len(request.ids) :]),
        logprob_T=np.array(logprobs, np.float32),
        logprob_t1_T=np.array(logprobs_t1, np.float32),
        version_T=np.zeros(len(logprobs), np.int16),
        versions=(version,),
        routes_PTLK=_with_absent(output.routes_NLK, model.config.absent_route) if request.routes else None,
        finish=finish,
        kept_T=np.zeros(len(logprobs), bool),
        seconds=time.monotonic() - begin_s,
    )


@torch.inference_mode()
def score(model: Decoder, ids: Many[int], version: Version, *, temperature: float = 1.0, block_size: int = 16) -> Scored:
    """What `NativeEngine.score` must return."""
    output = _forward(model, ids, block_size)
    logprob_T = np.zeros(len(ids), np.float32)
    if len(ids) > 1:
        logits_TV = model.logits(output.hidden_ND[:-1])
        logprob_T[1:] = sampler.logprobs(logits_TV, torch.tensor(ids[1:]).to(logits_TV.device), temperature).cpu().numpy()
    routes = output.routes_NLK
    return Scored(logprob_T=logprob_T, routes_TLK=None if routes is None else routes.cpu().numpy(), version=version)


def _forward(model: Decoder, ids: Many[int], block_size: int) -> Output:
    parameter = next(model.parameters())
    plan = Plan.packed([len(ids)], block_size, parameter.device)
    cache = PagedCache(model.config, blocks_for([len(ids)], block_size), block_size, parameter.dtype, parameter.device)
    return model(torch.tensor(ids, device=parameter.device), plan, cache)


def _with_absent(routes_NLK: Tensor | None, absent: int) -> np.ndarray | None:
    """Routes of the context, and an absent row for the token sampled last, which was never fed through the model."""
    if routes_NLK is None:
        return None
    rows = routes_NLK.cpu().numpy()
    return np.concatenate([rows, np.full_like(rows[:1], absent)])
