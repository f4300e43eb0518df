"""The software that runs Megatron-Core, and its overlap, are inputs of the step time."""

import pytest

import megaplan
from megaplan.cost.step.frameworks import frameworks
from megaplan.errors import MegaplanError
from megaplan.spec.host import RELEASED, Host


def seconds(plan: str, **host: object) -> float:
    found = megaplan.estimate(f"plans/{plan}.yaml", host={"name": "megatron", **host}, device__name="h100-sxm")
    assert found.step_seconds is not None
    return found.step_seconds


def terms(plan: str, **host: object) -> dict[str, float]:
    found = megaplan.estimate(f"plans/{plan}.yaml", host={"name": "megatron", **host}, device__name="h100-sxm")
    assert isinstance(found.step_time, megaplan.PlannedTime)
    return found.step_time.terms


def test_every_framework_of_the_host_has_constants_and_releases_are_theirs():
    known = frameworks()
    names = [name for name in Host.model_fields["framework"].annotation.__args__ if name != "gpt-neox"]  # Megatron's own modules' constants
    assert set(names) <= set(known)
    assert {name for name in names if known[name].releases} == set(RELEASED)


def test_frameworks_and_releases_have_their_own_times():
    times = {name: seconds("llama-3.1-8b", framework=name) for name in ("megatron-lm", "megatron-bridge", "nemo")}
    assert len(set(times.values())) == 3
    old, new = (seconds("mixtral-8x7b", framework="megatron-bridge", release=release) for release in ("25.09", "26.08"))
    assert old > new
    assert seconds("llama-3.1-8b", framework="nemo", release="25.02") == times["nemo"]  # no experts


def test_data_ranks_are_hidden_where_they_overlap():
    own, hidden, waits = (
        terms("llama-3.1-8b", **host)["exposed data"] for host in ({}, {"dp_comm_overlap": True}, {"dp_comm_overlap": False})
    )
    assert hidden < own == waits
    bridge, apart = (
        terms("llama-3.1-8b", framework="megatron-bridge", **host)["exposed data"] for host in ({}, {"dp_comm_overlap": False})
    )
    assert bridge < apart


def test_a_release_that_no_time_depends_on_is_refused():
    with pytest.raises(MegaplanError, match="MP902") as found:
        seconds("llama-3.1-8b", release="26.04")
    assert "host.release = 26.04" in str(found.value)
    with pytest.raises(MegaplanError):
        seconds("llama-3.1-8b", framework="nemo", release="latest")


def test_a_plan_without_these_keys_has_the_digest_it_had():
    assert not {"framework", "release", "dp_comm_overlap"} & set(Host(name="megatron").model_dump())
    assert Host(name="megatron", framework="nemo").model_dump()["framework"] == "nemo"
