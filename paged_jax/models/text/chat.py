"""Render a conversation into the prompt a model expects, with the chat template that came with it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


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
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes for HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
