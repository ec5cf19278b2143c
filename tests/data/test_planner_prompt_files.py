"""The planner's prompts: what they say, how they are versioned, and what a file may hold."""

import pytest

from rltr_verl.data import load_planner_prompt, load_planner_prompt_file, prompt_messages
from rltr_verl.data.prompt_files import LANGUAGES, language_of, parse_planner_prompt
from rltr_verl.errors import ConfigError
from rltr_verl.parsing import STOP_MARKER


@pytest.mark.parametrize("language", LANGUAGES)
def test_shipped_prompts_name_the_marker_and_no_call_format(language):
    prompt = load_planner_prompt(language)
    assert prompt.system.count(STOP_MARKER) == 1 and prompt.user == "$query"
    assert "tool_call" not in prompt.system and "</" not in prompt.system and "$" not in prompt.system
    assert prompt.version.startswith(f"planner_{language}@") and len(prompt.version.partition("@")[2]) == 12


def test_the_version_changes_with_the_words_and_with_nothing_else(tmp_path):
    file = tmp_path / "mine.txt"
    versions = []
    for text in ("Plan.\n=====\n$query\n", "\ufeffPlan. \r\n=====\r\n$query", "Plan!\n=====\n$query"):
        file.write_bytes(text.encode())
        versions.append(load_planner_prompt_file(file).version)
    assert versions[0] == versions[1] != versions[2] and versions[0].startswith("mine@")


def test_messages():
    prompt = parse_planner_prompt("Costs $$5.\n=====\nAsked: ${query} ($$)", "p", "p.txt")
    system, user = prompt_messages(prompt, "why $query?")
    assert system == {"role": "system", "content": "Costs $5."}
    assert user == {"role": "user", "content": "Asked: why $query? ($)"}
    bare = parse_planner_prompt("=====\n$query", "p", "p.txt")
    assert prompt_messages(bare, "q") == prompt_messages(None, "q") == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    "text",
    [
        "Plan.",
        "a\n=====\nb\n=====\n$query",
        "a\n=====\n",
        "a $query\n=====\n$query",
        "a\n=====\n$query $x",
        "a $\n=====\n$query",
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path, text):
    file = tmp_path / "mine.txt"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"--prompt: .*mine.txt: .*Fix: write"):
        load_planner_prompt_file(file)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe")
    for path, why in ((tmp_path / "x.txt", "not UTF-8"), (tmp_path / "none.txt", "No such file")):
        with pytest.raises(ConfigError, match=why):
            load_planner_prompt_file(path)
    with pytest.raises(ConfigError, match="languages: en, zh"):
        load_planner_prompt("fr")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How tall is it?", "en"),
        ("巴黎的人口是多少？", "zh"),
        ("请比较 Transformer 与 RNN 的 attention 机制", "zh"),
        ("What does 加油 mean in English when somebody shouts it?", "en"),
        ("東京の人口は？", "en"),
        ("12 + 3?", "en"),
        ("Combien d'habitants à Paris ?", "en"),
        ("한국의 수도 首都", "en"),
    ],
)
def test_language_of_a_query(text, language):
    assert language_of(text) == language
