"""The summarizer's prompt files: shipped in both languages, versioned, and strict about their placeholders."""

from __future__ import annotations

import pytest

from rltr_verl.data.prompt_files import LANGUAGES, load_summarizer_prompt, load_summarizer_prompt_file
from rltr_verl.errors import ConfigError


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_shipped_prompts_hold_the_record_between_two_tokens(language):
    prompt = load_summarizer_prompt(language)
    assert prompt.name == f"summarizer_{language}" and prompt.version.startswith(f"{prompt.name}@")
    assert prompt.user.index("$token") < prompt.user.index("$record") < prompt.user.rindex("$token")
    assert "[NO ANSWER]" in prompt.system


def test_the_version_is_that_of_the_words(tmp_path):
    (tmp_path / "mine.txt").write_text("Answer.\n=====\nBEGIN $token\n$record\nEND $token\n")
    first = load_summarizer_prompt_file(tmp_path / "mine.txt")
    (tmp_path / "mine.txt").write_text("Answer well.\n=====\nBEGIN $token\n$record\nEND $token\n")
    assert first.name == "mine" and first.version != load_summarizer_prompt_file(tmp_path / "mine.txt").version


@pytest.mark.parametrize(
    "text",
    [
        "Answer.\n=====\n$record\n",
        "Answer.\n=====\nBEGIN $token\n$record\n",
        "Answer.\n=====\n$token $token $record\n",
        "Answer.\n=====\n$token $record $record $token\n",
        "Answer $token.\n=====\n$token $record $token\n",
        "Answer.\n=====\n$token $record $query $token\n",
        "Answer.\n=====\n$token $token\n",
    ],
)
def test_a_record_that_is_not_enclosed_is_refused(tmp_path, text):
    (tmp_path / "mine.txt").write_text(text)
    with pytest.raises(ConfigError, match="found placeholders.*Fix: write .record once"):
        load_summarizer_prompt_file(tmp_path / "mine.txt")


def test_a_file_without_two_sections_or_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("$token $record $token")
    with pytest.raises(ConfigError, match="0 lines '====='"):
        load_summarizer_prompt_file(tmp_path / "mine.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_summarizer_prompt_file(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match="no summarizer prompt in language 'fr'"):
        load_summarizer_prompt("fr")
