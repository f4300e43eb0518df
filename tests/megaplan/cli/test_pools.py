"""Plan file, check, show, estimate, diff, report and JSON of a plan with pools."""

import json

POOL = "pools=[{count: 1, device: {name: a100-80gb}}]"


def test_costs_are_those_of_one_device(megaplan):
    ran = megaplan("costs", "plans/tiny-hybrid-pp2.yaml", "--set", POOL)
    assert (ran.status, ran.out) == (2, "")
    assert "hint: --set 'pools=[]'\n" in ran.err
    assert megaplan("costs", "plans/tiny-hybrid-pp2.yaml", "--set", POOL, "--set", "pools=[]").status == 0


def test_a_plan_carries_its_pools(megaplan, here):
    """Each of them names each stage's device, with room by its own capacity; a forged device is refused."""
    spec, before, after = "plans/tiny-hybrid-pp2.yaml", "before.json", "after.json"

    def out(*words):
        ran = megaplan(*words)
        assert ran.status == 0, ran
        return ran.out

    out("split", spec, "-o", before)
    assert "a100-80gb" in out("split", spec, "--set", POOL, "-o", after)
    out("check", after)
    assert "memory on h200 and a100-80gb" in out("show", after)
    assert "rank 1 on a100-80gb" in out("estimate", after)
    changed = megaplan("diff", before, after)
    assert changed.status == 1
    assert "pools: none" in changed.out
    assert "energy" in out("run", after, "--tokens", "1B")
    out("report", after, "-o", "page.html")
    assert "a100-80gb" in (here / "page.html").read_text(encoding="utf-8")
    document = json.loads(out("estimate", after, "--json"))
    named = {tuple(pool["ranks"]): pool for pool in document["device"]["pools"]}
    assert [named[run]["name"] for run in ((0, 1), (1, 2))] == ["h200", "a100-80gb"]
    for rank in document["ranks"]:
        (own,) = (pool for (start, stop), pool in named.items() if start <= rank["ranks"][0] < stop)
        assert rank["headroom_bytes"] == own["usable_bytes"] - rank["peak_bytes"]
        assert rank["device_bytes"] == rank["peak_bytes"] + own["reserve_bytes"]
    assert "pools" not in (here / before).read_text(encoding="utf-8")
    forged = json.loads((here / after).read_text(encoding="utf-8"))
    forged["estimates"]["device"]["pools"][1]["name"] = "h200"
    (here / after).write_text(json.dumps(forged), encoding="utf-8")
    assert "MP407" in megaplan("show", after).err
