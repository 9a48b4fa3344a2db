"""Render a conversation into the prompt a model expects, with the chat template in its GGUF metadata."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from decoder.tokenizer import special_ids


def render_chat(
    metadata: Mapping[str, Any], messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
) -> str:
    """The text of `messages`, each with a "role" and a "content", as the model was trained to read it."""
    source = metadata.get("tokenizer.chat_template")
    if source is None:
        raise ValueError(
            "expected a chat model, whose metadata has tokenizer.chat_template, got a model without a template: "
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
            .from_string(source)
            .render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,  # templates ask whether these two are none, not whether they are defined
                documents=None,
                **_special_texts(metadata),
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


def _special_texts(metadata: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and eos_token, those that the model has."""
    ids = special_ids(metadata)
    named = {"bos_token": ids.bos, "eos_token": ids.eos}
    return {name: metadata["tokenizer.ggml.tokens"][index] for name, index in named.items() if index is not None}
