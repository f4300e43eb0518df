"""`host.moe_dispatcher`: null is the host's default, and a plan's document has it as it had before the default was null."""

import pytest

from megaplan.spec.host import Host

DEFAULTS = {"megarun": "alltoall", "megatron": "allgather", "torchtitan": "alltoall"}


@pytest.mark.parametrize(("name", "usual"), DEFAULTS.items())
def test_null_and_the_default_by_its_name_are_one_host(name: str, usual: str) -> None:
    host = Host(name=name)
    assert host.dispatcher == usual
    assert Host(name=name, moe_dispatcher=usual) == host == Host(name=name, moe_dispatcher=None)


def test_megatrons_document_has_it_always_and_megaruns_where_it_is_not_the_default() -> None:
    assert Host(name="megatron").model_dump()["moe_dispatcher"] == "allgather"
    assert Host(name="megatron", moe_dispatcher="alltoall").model_dump()["moe_dispatcher"] == "alltoall"
    assert "moe_dispatcher" not in Host(moe_dispatcher="alltoall").model_dump()
    assert Host(moe_dispatcher="allgather").model_dump()["moe_dispatcher"] == "allgather"
    assert "moe_dispatcher" not in Host(name="torchtitan").model_dump()


def test_megarun_alone_gathers_tokens_by_this_runtime() -> None:
    assert Host(moe_dispatcher="allgather").gathers_tokens
    assert not Host().gathers_tokens
    assert not Host(name="megatron").gathers_tokens
