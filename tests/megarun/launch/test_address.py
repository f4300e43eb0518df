"""Names that do not resolve are reported within seconds, and an interface is chosen if the host's own name is unusable."""

import os
import socket
from typing import Any

import pytest

from megarun.errors import MegaplanError
from megarun.launch import address
from megarun.launch.address import INTERFACE, LOOPBACK, choose_interface, here, look_up, reachable_host

pytestmark = pytest.mark.runtime
NOWHERE = "no-such-host.invalid"


@pytest.fixture(autouse=True)
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE, raising=False)
    monkeypatch.setenv("MASTER_ADDR", LOOPBACK)


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver that knows numbers alone, at once."""
    real = socket.getaddrinfo

    def ask(host: str, *more: Any, **named: Any) -> Any:
        return real(host, *more, **{**named, "flags": socket.AI_NUMERICHOST})

    monkeypatch.setattr(socket, "getaddrinfo", ask)


def test_a_name_that_does_not_resolve_is_an_error(unknown: None) -> None:
    """The name, the words of the resolver and the way round are given; processes of one machine use its own address."""
    with pytest.raises(MegaplanError) as refused:
        reachable_host(NOWHERE, 29400, 0.1, alone=False)
    (found,) = refused.value.diagnostics
    assert found.code == "MP673"
    assert f"MASTER_ADDR = {NOWHERE} does not resolve" in found.detail
    assert "port 29400" in found.detail
    assert any("--rdzv-endpoint" in hint for hint in found.hints)
    host, remark = reachable_host(NOWHERE, 29400, 0.1, alone=True)
    assert host == LOOPBACK
    assert NOWHERE in remark
    assert reachable_host(LOOPBACK, 29400, 0.1, alone=False) == (LOOPBACK, "")


def test_a_resolver_without_an_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = address.threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: over.wait(30))
    assert "gave no answer within 0.05 s" in look_up(NOWHERE, 0.05)
    over.set()


def test_a_host_name_without_an_address_gets_an_interface(unknown: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interface by which the store is reached; one that the user has chosen stays."""
    monkeypatch.setattr(socket, "gethostname", lambda: NOWHERE)
    remark = choose_interface(LOOPBACK)
    assert os.environ[INTERFACE] == "lo"
    assert NOWHERE in remark
    assert "interface lo" in here()
    assert choose_interface(LOOPBACK) == ""


def test_a_host_name_of_another_machine_gets_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of a documentation network, which no interface has."""
    monkeypatch.setattr(socket, "gethostname", lambda: "192.0.2.7")
    assert "192.0.2.7 is not of this machine" in choose_interface("")
    assert os.environ[INTERFACE] == "lo"


def test_a_usable_host_name_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: LOOPBACK)
    assert choose_interface(LOOPBACK) == ""
    assert INTERFACE not in os.environ
