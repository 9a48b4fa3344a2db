"""Render a conversation into the prompt a model expects, with the chat template that came with it."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


@dataclass(frozen=True)
class ChatTemplate:
    source: str  # Jinja
    tokens: Mapping[str, str]  # what the template calls bos_token, eos_token, ...


def render_chat(
    template: ChatTemplate | None, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
) -> str:
    """The text of `messages`, each with a "role" and a "content", as the model was trained to read it."""
    if template is None:
        raise ValueError(
            "expected a chat model, which comes with a chat template, got a model without a template: "
            "give it plain text instead"
        )
    for message in messages:
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(
                f"expected every message to have a 'role' and a 'content' that are strings, got {message!r}"
            )
    try:
        return (
            _environment()
            .from_string(template.source)
            .render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,  # templates ask whether these two are none, not whether they are defined
                documents=None,
                **template.tokens,
            )
        )
    except Exception as problem:  # the template is a program that came with the model: it may fail in any way
        raise ValueError(
            f"expected messages that the model's chat template accepts, got its error: {problem}"
        ) from problem


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up, in a sandbox because the template comes with the model."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks what the model says, for training: its text is that inside."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` to call, without a class's other attributes."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **named: Any) -> None:  # `self` may be a name of the template's
        self, *given = args
        names = dict(*given, **named)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace's names begin with a letter, got {name!r}")


def _to_json(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes for HTML, and takes other arguments."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
