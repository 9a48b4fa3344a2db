"""Chat templates are rendered as transformers renders them: its whole environment, and templates that use it."""

from typing import Any

import pytest

from paged_jax.models.text import chat
from paged_jax.models.text.chat import ChatTemplate, render_chat

MESSAGES = [
    {"role": "system", "content": "Be <brief> & ü"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "no\n"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>"}

# Template → its text; those without one are compared with transformers alone.
RENDERED = {
    "{% generation %}{{ messages[2].content }}{% endgeneration %}|": "no\n|",
    "{%- generation -%} a {%- endgeneration -%} b": "ab",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}": "21",  # a scope of its own
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}": "user",
    "{{ messages[0] | tojson }}": '{"role": "system", "content": "Be <brief> & ü"}',
    "{{ messages[0].content | tojson(ensure_ascii=True) }}": '"Be <brief> & \\u00fc"',
    "{{ {'b': 1, 'a': [2]} | tojson(separators=(',', ':'), sort_keys=True) }}": '{"a":[2],"b":1}',
    "{{ {'a': 1} | tojson(indent='\t') }}": '{\n\t"a": 1\n}',
    "{{ {'a': 1} | tojson(indent=2) }}": '{\n  "a": 1\n}',
    "{% set n = namespace(found=false) %}{% set n.found = true %}{{ n.found }}": "True",
    "{% set n = namespace({'a': 1}, self=2) %}{{ n.a }}{{ n.self }}": "12",
    "{{ dict(a=1).a }}{{ dict([('b', 2)]).b }}{{ dict.fromkeys('cc', 3) }}": "12{'c': 3}",
    "{{ strftime_now('%%Y') }}": "%Y",
    "{{ bos_token }}{{ eos_token }}{{ image_token }}{{ pad_token }}": "<s></s><image>",
    "{{ tools is none }}{{ documents is none }}{{ missing is defined }}": "TrueTrueFalse",
    "{{ '<&>' }}{{ '<&>' | escape }}": "<&>&lt;&amp;&gt;",
    "a  \n  {% if true %}  \n  b\n  {% endif %}\nc\n": "a  \n  \n  b\nc",
    "{{ messages | map(attribute='role') | join(',') }}": "system,user,assistant",
    "{{ messages[0]['content'].split(' ')[-1] }}{{ 'x' ~ 1 }}": "üx1",
}
FAILING = [
    "{{ raise_exception('roles must alternate') }}",
    "{% generation %}",
    "{% set n = namespace(_a=1) %}",
    "{% set n = namespace() %}{% set n._a = 1 %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ dict.mro() }}",
    "{% do messages %}",
    "{{ undefined.attribute }}",
]


@pytest.mark.parametrize("source", RENDERED)
def test_a_template_of_each_feature(source: str) -> None:
    assert render_chat(ChatTemplate(source, TOKENS), MESSAGES) == RENDERED[source]


@pytest.mark.parametrize("source", FAILING)
def test_a_template_that_fails_is_one_kind_of_error(source: str) -> None:
    with pytest.raises(ValueError, match="the model's chat template accepts, got its error: "):
        render_chat(ChatTemplate(source, TOKENS), MESSAGES)


@pytest.mark.parity
@pytest.mark.parametrize("source", [*RENDERED, *FAILING])
def test_templates_give_what_transformers_gives(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")

    def theirs() -> str:
        options: dict[str, Any] = {"add_generation_prompt": True, **TOKENS}
        return utils.render_jinja_template([MESSAGES], chat_template=source, **options)[0][0]

    if source in RENDERED:
        assert theirs() == RENDERED[source]
    else:
        with pytest.raises(Exception):  # noqa: B017, PT011 - of whatever kind
            theirs()


@pytest.mark.parity
def test_the_environment_is_that_of_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs, ours = utils._compile_jinja_template("").environment, chat._environment()
    for names in ("globals", "filters", "tests"):
        assert getattr(ours, names).keys() == getattr(theirs, names).keys()
    assert {tag for part in ours.extensions.values() for tag in part.tags} == {
        tag for part in theirs.extensions.values() for tag in part.tags
    }
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape", "undefined", "finalize"):
        assert getattr(ours, name) == getattr(theirs, name), name
