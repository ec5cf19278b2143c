"""Prompt files: what ships is sound, and a file of the user's own is refused with the line and the fix."""

import re

import pytest

from rltr_verl.errors import ConfigError
from rltr_verl.judge.prompt_files import JOBS, LANGUAGES, load_prompt, load_prompt_file

GOOD = "You judge.\n=====\n$tools\nBEGIN $token\n$record\nEND $token\nComplete?\n"


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_shipped_prompts_load_ask_for_the_same_json_and_bracket_the_data(job, language):
    prompt = load_prompt(job, language)
    assert re.fullmatch(rf"{job}_{language}@[0-9a-f]{{12}}", prompt.version)
    assert re.search(r'^\{"reason": "<.*>", "score": <.*1.*0.*>\}$', prompt.system, re.MULTILINE)
    assert prompt.user.count("\nBEGIN $token\n") == 1 and prompt.user.count("\nEND $token\n") == 1


def test_versions_follow_the_wording():
    versions = {load_prompt(job, language).version.split("@")[1] for job in JOBS for language in LANGUAGES}
    assert len(versions) == len(JOBS) * len(LANGUAGES)


def test_a_prompt_that_is_not_shipped_is_refused():
    with pytest.raises(ConfigError, match=r"rltr.judge.prompt: no prompt for job 'tone' .* Fix: jobs: completeness"):
        load_prompt("tone", "en")


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("You judge.", "It costs $$5.").replace("\n", "\r\n").encode())
    prompt = load_prompt_file(path)
    assert prompt.system == "It costs $5." and prompt.name == "mine" and prompt.user.startswith("$tools\nBEGIN")
    path.write_text(GOOD)
    assert load_prompt_file(path).version != prompt.version


WRONG = {
    "no ruler": ("You judge.\n$tools $record $token", r"line 2: 0 lines '=====', not one\. Fix: write the system"),
    "two rulers": (GOOD + "=====\n", r"line 8: 2 lines '====='"),
    "no system": (GOOD.removeprefix("You judge.\n"), r"line 1: the system message is empty"),
    "no user": ("You judge.\n=====\n", r"line 3: the user message is empty"),
    "unknown": (GOOD.replace("$tools", "$tools $recrod"), r"line 3: unknown placeholder \$recrod\. Fix: did you mean"),
    "missing": (GOOD.replace("$tools\n", "\n"), r"line 3: the user message lacks \$tools\. Fix: a prompt for compl"),
    "lone dollar": (GOOD.replace("Complete?", "Costs $5?"), r"line 7: a '\$' that starts no placeholder.*'\$\$'"),
    "in system": (GOOD.replace("You judge.", "You\n$record"), r"line 2: placeholder \$record in the system message"),
    "outside": (GOOD.replace("END $token\n", ""), r"line 5: \$record does not stand between two lines with \$token"),
    "other job's": (GOOD.replace("$record", "$record $answer"), r"line 5: unknown placeholder \$answer\. Fix: known:"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_named_with_line_and_fix(tmp_path, text, message):
    path = tmp_path / "mine.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"rltr\.judge\.prompt: {re.escape(str(path))}, {message}"):
        load_prompt_file(path)


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.txt cannot be read: No such file.*Fix: give the path"):
        load_prompt_file(tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_prompt_file(tmp_path)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read: not UTF-8 text"):
        load_prompt_file(tmp_path / "binary.txt")


def test_a_file_for_another_job(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("Judge.\n=====\n$token\n$query\n$answer\n$token")
    assert load_prompt_file(path, "relevance").user.endswith("$token")
    with pytest.raises(ConfigError, match=r"lacks \$reference"):
        load_prompt_file(path, "correctness")
