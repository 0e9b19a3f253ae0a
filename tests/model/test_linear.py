"""The two kernels behind `matmul` compute one function; padding and norm do what they say."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from etude.model.linear import ONEDNN_ROWS, Linear, RMSNorm, matmul, pack, pad_rows, round_up, sigmoid_column, together


@pytest.mark.parametrize("rows", [1, ONEDNN_ROWS - 1, ONEDNN_ROWS, 700])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("invariant", [True, False])
def test_matmul_and_its_gradients(rows, bias, invariant):
    """Against torch's linear in float64, on both sides of the switch of kernels."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((rows, 96), (64, 96), (rows, 64)))
    offset = torch.randn(64, generator=generator) if bias else None
    got_inputs = [t.clone().requires_grad_() for t in (x, weight, *([offset] if bias else []))]
    exact_inputs = [t.double().requires_grad_() for t in (x, weight, *([offset] if bias else []))]
    got, exact = matmul(*got_inputs, invariant=invariant), F.linear(*exact_inputs)
    got.backward(grad)
    exact.backward(grad.double())
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
    for a, b in zip(got_inputs, exact_inputs, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-3)


def test_matmul_skips_gradients_nobody_wants():
    x, weight = torch.randn(200, 64), torch.randn(64, 64, requires_grad=True)
    matmul(x, weight, invariant=False).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    x.requires_grad_()
    matmul(x, weight.detach(), invariant=False).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(200, 64), rtol=1e-4, atol=1e-4)


def test_padding():
    assert [round_up(n, 16) for n in (1, 16, 17)] == [16, 16, 32]
    x = torch.ones(3, 2)
    assert pad_rows(x, 3) is x
    assert pad_rows(x, 5).tolist() == [[1, 1]] * 3 + [[0, 0]] * 2


def test_norm_is_computed_in_float32():
    """Values whose squares overflow half precision; weight applied after."""
    norm = RMSNorm(4, 1e-6).to(torch.float16)
    torch.nn.init.constant_(norm.weight, 2.0)
    assert norm(torch.full((1, 4), 1000.0, dtype=torch.float16)).tolist() == [[2.0] * 4]


def test_sigmoid_column():
    x = torch.linspace(-30, 30, 48).unsqueeze(1)
    torch.testing.assert_close(sigmoid_column(x), torch.sigmoid(x))
    assert torch.equal(sigmoid_column(x)[:16], sigmoid_column(x[:16]))


@pytest.mark.parametrize("rows", [1, 5, 32, 200])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_product_is_that_of_its_layers_and_follows_weights_that_change_in_place(rows, bias, dtype):
    torch.manual_seed(0)
    parts = tuple(Linear(96, width, bias=bias, invariant=False).to(dtype) for width in (64, 16, 16))
    for parameter in itertools.chain(*(part.parameters() for part in parts)):
        torch.nn.init.normal_(parameter)
    x = torch.randn(rows, 96).to(dtype)
    packed = pack(*parts)
    assert packed is not None
    for _ in range(2):
        with torch.inference_mode():
            got = together(packed, parts, x)
        for part, g in zip(parts, got, strict=True):
            exact = F.linear(x.double(), part.weight.double(), None if part.bias is None else part.bias.double())
            torch.testing.assert_close(
                g.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0.3 if dtype == torch.bfloat16 else 1e-3
            )
        with torch.no_grad():
            parts[1].weight.copy_(torch.randn(16, 96))  # as a weight swap does
    assert together(packed, parts, x)[0].requires_grad, "training takes the layers themselves"
    parts[2].weight.detach().view(torch.uint8).numpy()[:] = 0  # behind torch's back
    packed.lay_out()
    with torch.inference_mode():
        third = together(packed, parts, x)[2]
    expected = torch.zeros_like(third) if parts[2].bias is None else parts[2].bias.expand_as(third)
    assert torch.equal(third, expected)


def test_what_cannot_be_packed_stays_as_it_is():
    assert pack(Linear(8, 8, invariant=False).to(torch.float64)) is None
    assert pack(Linear(8, 8, invariant=False), Linear(8, 8, invariant=False).to("meta")) is None
