"""Failures that are known and open: a pattern of their signature, and a sentence about each."""

from __future__ import annotations

__all__ = ["KNOWN"]

INDICES = "An index that is out of range on a cut dim, or in take, put, one_hot, gives a number."

KNOWN: dict[str, str] = {
    r"^missing: bad\.(lookup|put|flat|rows)": INDICES,
    r"^missing: bad\.values:(one_hot|masked_scatter|index_put)": INDICES,
    r"^missing: bad\.values:(inv|cholesky|solve)": "Errors of linear algebra are dropped.",
    r"'\.\.\.' object has no attribute '\.\.\.'": "copy_ of a number; mvlgamma under vmap.",
    r"last dimension with stride|X\.is_contiguous|self\.stride|requires contiguous input": (
        "Ops that need strides get what contiguous() would have made, without it."
    ),
    r"^error KeyError: Var": "Identities under inference mode, and writes through dropped copies.",
    r"not a valid value for reduction|whose output has alias annotations": (
        "Composite ops are not decomposed under inference mode."
    ),
    r"would mutate a captured Tensor": (
        "An argument that is no float is written in place while another one requires grad."
    ),
    r"unresolved conjugated tensors|with negative bit set": "Lazy conj and neg bits of blocks.",
    r"has internal overlap|mutation on a view chain": "Functionalization refuses these writes.",
    r"rule for aten\.native_batch_norm_backward|a row of the rule for": (
        "The rule of the backward of batch norm has a row for outputs that are not there."
    ),
    r"converted to type float without overflow": "Attention in float64 on two axes.",
    r"DataDependentError of DataDependentOutputException": (
        "What has a backward that depends on data is refused by `call` too."
    ),
    r"split_with_sizes expects|Dimension out of range": "One output of unbind or split is read.",
    r"Given normalized_shape": "Layer norm of an empty tensor on a cut dim.",
}
"""A test that meets one of these is skipped, with its sentence."""
