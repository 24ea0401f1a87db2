"""What `long_cases.txt` leaves to `make test-slow` is there, and no file leaves all that it has."""

import re

from conftest import LONG_CASES

CASES = [line for line in LONG_CASES.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
FILES = {case.partition("::")[0] for case in CASES}


def functions_of(file: str) -> set[str]:
    return {*re.findall(r"^def (test_\w+)\(", LONG_CASES.with_name(file).read_text(encoding="utf-8"), re.MULTILINE)}


def listed_of(file: str) -> set[str]:
    return {case.partition("::")[2] for case in CASES if case.startswith(f"{file}::")}


def test_they_are_sorted_and_each_is_there_once():
    assert sorted({*CASES}) == CASES


def test_each_is_a_case_of_a_test_that_there_is():
    named = {file: {case.partition("[")[0] for case in listed_of(file)} for file in FILES}
    assert not {file: names - functions_of(file) for file, names in named.items() if names - functions_of(file)}


def test_each_file_keeps_a_test_in_ci():
    """Of a table of cases the fastest third stays there; a test alone that is listed has another beside it."""
    alone = {file: {case for case in listed_of(file) if "[" not in case} for file in FILES}
    assert not [file for file, listed in alone.items() if not functions_of(file) - listed]
