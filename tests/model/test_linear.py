"""The two kernels behind `matmul` compute one function; padding and norm do what they say."""

import pytest
import torch
import torch.nn.functional as F

from etude.model.linear import ONEDNN_ROWS, RMSNorm, matmul, pad_rows, round_up, sigmoid_column


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
