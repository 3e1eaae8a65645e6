"""`Pretrained`: a causal language model in a folder of Hugging Face, trained as it is.

Its own class computes, and the plan of tensor parallelism that it has says how it is cut.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from fdtensor.io.safetensors import load_safetensors, save_safetensors
from fdtensor.layouts.errors import FdtensorError
from fdtensor.layouts.layout import Layout
from fdtensor.layouts.placement import Placement, Replicate, Shard
from fdtensor.runtime.comm import Comm
from fdtensor.train.model import Params, Part, Pin, layer_runs
from fdtensor.train.text import VOCABULARY, corpus, files

__all__ = ["Pretrained"]

PLACEMENTS: Mapping[str, Placement] = {
    "embedding_rowwise": Shard(0),  # the vocabulary
    "colwise*": Shard(0),  # nn.Linear keeps the transpose, (out, in)
    "local_colwise": Shard(0),
    "rowwise*": Shard(1),
    "local_rowwise": Shard(1),
    "replicated*": Replicate(),
}
"""What a word of a plan says of a weight along an axis; the first pattern that fits counts."""


@attrs.frozen
class Pretrained:
    """The model in a folder as published ones are: its configuration and safetensors.

    Its methods raise `FdtensorError` where there is no such folder, and without `transformers`.
    """

    folder: str
    length: int = 64
    """How many tokens it sees at once."""

    @property
    def dropout(self) -> float:
        """None is dropped: a published model is trained as it predicts."""
        return 0.0

    @property
    def title(self) -> str:
        return f"the {type(_known(self.folder)).__name__} in {self.folder!r}"

    def module(self, pin: Pin | None = None) -> nn.Module:
        """The class of the model, with its buffers, but without the numbers of its parameters."""
        if pin is None:
            return _known(self.folder)
        module, plan = _empty(self.folder), _plan(self.folder)
        head, columns = module.get_output_embeddings(), ("colwise", "local_colwise")
        for name, part in module.named_modules():
            if part is head or _style(plan, name) in columns:
                _pin_output(part, pin, "hidden")
        for part in [module.get_input_embeddings(), *_blocks(module)]:
            _pin_output(part, pin, "residual")
        return module

    def logits(self, module: nn.Module, params: Params, tokens: torch.Tensor) -> torch.Tensor:
        return _run(module, "input_ids", params, tokens)

    def parts(self, pins: Sequence[Pin | None]) -> list[Part]:
        """Each with the class of the model, of which the layers of others do nothing.

        Raises `FdtensorError` too for a model that does more than its plan of pipelines says.
        """
        runs = layer_runs(len(_blocks(_known(self.folder))), len(pins))
        _check_parts(self.folder)
        return [self._part(run, pin) for run, pin in zip(runs, pins, strict=True)]

    def _part(self, run: range, pin: Pin | None) -> Part:
        module: Any = _empty(self.folder) if pin is None else self.module(pin)
        used = _used(module, run)
        _skip([part for part in (*_blocks(module), *_ends(module)) if part not in used])
        taken = "input_ids" if run.start == 0 else "inputs_embeds"
        return Part(_names(module, used), functools.partial(_run, module, taken))

    def part_names(self, count: int) -> list[tuple[str, ...]]:
        module = _known(self.folder)
        _check_parts(self.folder)
        return [
            _names(module, _used(module, run)) for run in layer_runs(len(_blocks(module)), count)
        ]

    def placement(self, name: str) -> Placement:
        """What the model's own plan says. Raises `FdtensorError` where it says nothing known."""
        plan = _plan(self.folder)
        if not plan:
            raise FdtensorError(
                f"{type(_known(self.folder)).__name__} has no plan of tensor parallelism.",
                folder=self.folder,
                hint="Train it on axes dp and fsdp.",
            )
        module, _, kind = name.rpartition(".")
        style = _style(plan, module)
        for pattern, placement in PLACEMENTS.items():
            if fnmatchcase(style, pattern):
                return Replicate() if kind == "bias" and placement == Shard(1) else placement
        raise FdtensorError(
            f"the model's plan cuts {module!r} as {style!r}, which is not known.",
            folder=self.folder,
            hint="Train it on axes dp and fsdp.",
        )

    def initial(self, seed: int, layouts: Mapping[str, Layout], comm: Comm[Any]) -> dict[str, Any]:
        """The numbers in the folder, of which a rank reads only its blocks."""
        del seed
        return load_safetensors(self.folder, dict(layouts), comm, strict=False)

    def text(self) -> torch.Tensor:
        """The sources of Python's library, in the folder's tokens; a token a byte without any."""
        return _tokens(self.folder)

    def save(self, params: Mapping[str, Any], folder: str, comm: Comm[Any]) -> None:
        """Writes a folder like the first, with other numbers. Collective."""
        save_safetensors(dict(params), folder, comm)
        for path in Path(self.folder).iterdir():
            kept = path.suffix in (".json", ".txt", ".model", ".jinja")
            if kept and not path.name.endswith(".index.json"):
                (Path(folder) / path.name).write_bytes(path.read_bytes())


def _run(module: nn.Module, taken: str, params: Params, x: torch.Tensor) -> torch.Tensor:
    """What a model gives for the argument of the name `taken`."""
    names = inspect.signature(module.forward).parameters
    cache = "cache" if "cache" in names else "past_key_values"  # until transformers 5.24
    given = {taken: x, cache: _uncached()()}
    return torch.func.functional_call(module, params, (), given).logits


def _used(module: Any, run: range) -> list[nn.Module]:
    """What runs of a model in the part that has these layers."""
    layers = _blocks(module)
    used = [layers[i] for i in run]
    used += [module.get_input_embeddings()] if run.start == 0 else []
    return used + (_ends(module) if run.stop == len(layers) else [])


def _names(module: nn.Module, used: Sequence[nn.Module]) -> tuple[str, ...]:
    """The names of the parameters of these parts, in the whole model."""
    own = {id(p) for part in used for p in part.parameters()}
    return tuple(name for name, p in module.named_parameters() if id(p) in own)


def _skip(parts: Sequence[nn.Module]) -> None:
    """Makes each module the identity."""
    for part in parts:
        part.forward = lambda hidden_states, *_args, **_kwargs: hidden_states


def _ends(module: Any) -> list[nn.Module]:
    """What follows the layers of a model, by its plan of pipelines: the last norm and the head."""
    base, names = module.base_model, list(module.config.base_model_pp_plan or ())
    *_, last = (name for name, part in base.named_children() if isinstance(part, nn.ModuleList))
    after = names[names.index(last) + 1 :] if last in names else []
    return [*[base.get_submodule(name) for name in after], module.get_output_embeddings()]


@functools.cache
def _check_parts(folder: str) -> None:
    """Refuses a model that computes outside of its layers, embedding, last norm and head.

    One that scales what it embeds, or the logits, would do so in each of its parts.
    """
    module = _empty(folder)
    _skip([*_blocks(module), *_ends(module)])
    x = torch.linspace(-1, 1, 2 * module.config.hidden_size).view(1, 2, -1)
    planned = bool(module.config.base_model_pp_plan)
    if not planned or not torch.equal(_run(module, "inputs_embeds", {}, x), x):
        raise FdtensorError(
            f"{type(module).__name__} cannot be cut into parts of its layers: "
            + ("it does more than they do." if planned else "it has no plan of pipelines."),
            folder=folder,
            hint="Train it without an axis pp.",
        )


def _style(plan: Mapping[str, str], module: str) -> str:
    """The word of a plan for a module; that of one that it does not name is `replicated`."""
    words = (word for pattern, word in plan.items() if fnmatchcase(module, pattern))
    return next(words, "replicated")


def _pin_output(part: nn.Module, pin: Pin, name: str) -> None:
    def pinned(_part: nn.Module, _args: Any, out: Any) -> Any:
        return (pin(out[0], name), *out[1:]) if isinstance(out, tuple) else pin(out, name)

    part.register_forward_hook(pinned)


def _blocks(module: Any) -> list[nn.Module]:
    """The layers, one after the other: those of the lists of the model without its head."""
    lists = (part for part in module.base_model.children() if isinstance(part, nn.ModuleList))
    return [block for part in lists for block in part]


def _empty(folder: str) -> Any:
    """The module, the parameters of which are on the meta device."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise FdtensorError(
            f"a model from {folder!r} needs transformers.", hint="pip install transformers"
        ) from None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FdtensorError(
            f"{folder!r} has no configuration of a model that transformers knows.",
            told=str(error).partition("\n")[0],
            hint="Give a folder as save_pretrained writes it: config.json and safetensors.",
        ) from None
    with _without_numbers():
        return AutoModelForCausalLM.from_config(config).eval()


_known = functools.cache(_empty)
"""One module for all that is asked of it; it must not be changed."""


@functools.cache
def _plan(folder: str) -> Mapping[str, str]:
    """The words of the model's plan by patterns of module names; those of both ends too."""
    module = _known(folder)
    plan = getattr(module.config, "base_model_tp_plan", None)
    if not plan:
        return {}
    names = {id(part): name for name, part in module.named_modules()}
    ends = {
        names[id(module.get_input_embeddings())]: "embedding_rowwise",
        names[id(module.get_output_embeddings())]: "colwise_gather_output",
    }
    return {f"{module.base_model_prefix}.{name}": style for name, style in plan.items()} | ends


@contextmanager
def _without_numbers() -> Generator[None]:
    """A context in which parameters are on the meta device, and buffers are not."""

    def registered(_module: nn.Module, _name: str, p: nn.Parameter | None) -> nn.Parameter | None:
        if p is None or p.is_meta:
            return p  # that of another module, which is tied to it
        return nn.Parameter(p.to("meta"), p.requires_grad)

    handle = register_module_parameter_registration_hook(registered)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@functools.cache
def _uncached() -> Callable[[], Any]:
    """An empty cache that keeps nothing.

    With one a model does not look for several texts in a row, which it finds in any while it is
    traced, and then has no mask to make: attention is causal, by the fastest kernel.
    """
    from transformers import DynamicCache

    class Uncached(DynamicCache):
        def update(self, key_states: Any, value_states: Any, *_args: Any, **_kwargs: Any) -> Any:
            return key_states, value_states

    return Uncached


@functools.cache
def _tokens(folder: str) -> torch.Tensor:
    path, size = Path(folder) / "tokenizer.json", _known(folder).config.vocab_size
    if path.exists():
        from tokenizers import Tokenizer

        texts = [path.read_text("utf-8", errors="replace") for path in files()]
        encoded = Tokenizer.from_file(str(path)).encode_batch(texts, add_special_tokens=False)
        return torch.tensor([token for one in encoded for token in one.ids])
    if size < VOCABULARY:
        raise FdtensorError(
            f"the vocabulary of {folder!r} has {size} tokens, too few for one a byte.",
            hint="Give a folder with a tokenizer.json.",
        )
    return corpus()
