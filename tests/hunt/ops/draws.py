"""Ops that draw random numbers: from the key of the call, where there is one."""

from __future__ import annotations

from tests.hunt.draw import Draw, Op

__all__ = ["OPS"]


def _written(d: Draw, x: str) -> str:
    how = d.one(("normal_()", "uniform_(-1, 1)", "bernoulli_(0.5)", "random_(0, 5)"))
    return f"{d.one((x, f'{x}[..., :1]', f'{x}.transpose(0, -1)'))}.{how}"


OPS = (
    Op("dropout", lambda d, x: f"F.dropout({x}, {d.one((0.3, 0.5))})", "f", False),
    Op("rand_like", lambda d, x: f"torch.rand_like({x})", "f", False),
    Op("randn_like", lambda d, x: f"{x} + torch.randn_like({x})", "f", False),
    Op("randint_like", lambda d, x: f"torch.randint_like({x}, 5)", "fi"),
    Op("rand", lambda d, x: f"{x} * torch.rand({list(d.shape(x))})", "f", False),
    Op("randperm", lambda d, x: f"{x}[torch.randperm({d.shape(x)[0]})]", "f", False, least=1),
    Op("bernoulli", lambda d, x: f"torch.bernoulli(torch.sigmoid({x}))", "f", False),
    Op("random_", _written, "f", False, least=1, writes=True),
    Op("alpha_dropout", lambda d, x: f"F.alpha_dropout({x}, 0.3)", "f", False),
    Op("feature_dropout", lambda d, x: f"F.dropout2d({x}, 0.5)", "f", False, least=3, most=4),
)
