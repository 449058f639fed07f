"""Servers that die: kills of real server processes while workers push, every weight compared after every update."""

from collections.abc import Iterator, Sequence

from bagu.bench.server_kills import record
from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, number, say, share_met
from bagu.lab.plot import Bars, Panel

FAULTS = ("kill", "pair", "manager")
NAMES_ZH = {"kill": "一个服务器", "pair": "相邻两个", "manager": "管理进程"}
SOON_S = 2.0


def run(setting: Setting) -> Iterator[Row]:
    kills = 2 if setting.quick else 20
    for fault in setting.track(FAULTS):
        found = record(kills, how=fault, say=lambda _: None).row()
        yield {"fault": fault, **found}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if no update was lost or doubled, and workers went on soon."""
    met = [number(r, "wrong_updates") == 0 and number(r, "recovery_max_s") <= SOON_S for r in rows]
    said = [
        say(
            "{name} {kills:.0f} times: {wrong:.0f} of {updates:.0f} updates wrong, at most {most:.2f} s",
            "{name_zh} {kills:.0f} 次：{updates:.0f} 次更新中 {wrong:.0f} 次有误，最多 {most:.2f} 秒",
            name=r["fault"],
            name_zh=NAMES_ZH[str(r["fault"])],
            kills=number(r, "kills"),
            wrong=number(r, "wrong_updates"),
            updates=number(r, "updates"),
            most=number(r, "recovery_max_s"),
        )
        for r in rows
    ]
    return Verdict.say(share_met(met), "SIGKILL: {said}.", "SIGKILL：{said}。", said=listed(said, "; ", "；"))


def plot(rows: Sequence[Row]) -> list[Panel]:
    bars = [Bars(column(rows, f"recovery_{name}_s"), name, text="{:.2f}") for name in ("median", "max")]
    return [Panel(bars, "From a kill to the next update", "", "s", xnames=[str(row["fault"]) for row in rows])]


LAB = Claim(
    title_en="Failover",
    title_zh="故障接管",
    claim_en="With two copies of each range, servers can be killed without losing an update.",
    claim_zh="每个区间有两份副本，服务器被杀也不丢失更新。",
    regime="Four servers and a manager as processes, two workers with known gradients, 65,536 fp64 values.",
    varies="SIGKILL of a server, of two adjacent servers at once, of the manager, at random moments.",
    measures=f"Updates after which a weight is not the exact sum; time from a kill to the next update of all workers, "
    f"at most {SOON_S} s.",
)
