"""How dense_fp8 cuts products of many tokens: its plan and schedule, compiled for the host, multiply all once."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = r"""
#include <algorithm>
#include <cstdio>
#include <vector>

#include "dense_fp8/plan.h"
#include "dense_fp8/wide_schedule.h"

using namespace gptoss::dense_fp8;

// Lines of tokens, rows, multiprocessors; for each how often a group of 64 rows and 256 tokens is multiplied, least
// and most, and the groups of the busiest cluster and of all.
int main() {
  int tokens, rows, multiprocessors;
  while (std::scanf("%d %d %d", &tokens, &rows, &multiprocessors) == 3) {
    const WideCut cut = cut_wide(tokens, rows, multiprocessors);
    const int tiles = (tokens + 255) / 256, groups = (rows + 63) / 64;
    std::vector<int> times(tiles * groups);
    int busiest = 0, all = 0, outside = 0;
    for (int cluster = 0; cluster < cut.clusters; ++cluster) {
      int own = 0;
      for (WideSchedule schedule(cut, cluster); !schedule.done(); schedule.advance()) {
        const WideItem item = schedule.item();
        own += item.groups;
        for (int i = 0; i < item.groups; ++i) {
          const int group = item.row / 64 + i;
          if (item.row % 64 != 0 || item.tokens < 0 || item.tokens >= tiles || group < 0 || group >= groups) {
            ++outside;
          } else {
            ++times[item.tokens * groups + group];
          }
        }
      }
      busiest = std::max(busiest, own);
      all += own;
    }
    const auto [least, most] = std::minmax_element(times.begin(), times.end());
    std::printf("%d %d %d %d %d %d\n", *least, *most, outside, busiest, all, cut.clusters);
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense_items")
    source, made = folder / "items.cpp", folder / "items"
    source.write_text(PROGRAM)
    nvcc, sources = shutil.which("nvcc"), ROOT / "plugins" / "csrc"
    assert nvcc is not None
    done = subprocess.run(
        [nvcc, "-std=c++17", f"-I{sources}", source, sources / "dense_fp8" / "plan.cpp", "-o", made],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return made


def counted(program: Path, cases: list[tuple[int, int, int]]) -> list[tuple[int, ...]]:
    """Of each case of tokens, rows and multiprocessors: least and most times, outside, busiest, all, clusters."""
    lines = "".join(f"{tokens} {rows} {count}\n" for tokens, rows, count in cases)
    done = subprocess.run([program], input=lines, capture_output=True, text=True, check=True, timeout=120)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


# q, k, v and `out` of the models whole and of two and four ranks, the lm head, and small ones.
ROWS = [5120, 2880, 2560, 1280, 4096, 640, 320, 8, 64, 72, 136, 200, 2888]


def test_all_is_multiplied_once(program: Path) -> None:
    cases = [(tokens, rows, count) for tokens in range(1, 8193, 89) for rows in ROWS for count in (132, 114, 78, 16, 2)]
    cases += [(tokens, 201088, 132) for tokens in (1, 768, 1000)] + [(65536, rows, 132) for rows in ROWS]
    for case, (least, most, outside, _, total, _) in zip(cases, counted(program, cases), strict=True):
        assert (least, most, outside) == (1, 1, 0), case
        assert total == -(-case[0] // 256) * -(-case[1] // 64), case


@pytest.mark.parametrize(
    ("tokens", "rows", "most"),
    [(8192, 5120, 39), (8192, 2880, 22), (4096, 5120, 21), (4096, 2880, 12), (2048, 5120, 10)],
)
def test_the_busiest_cluster_has_little_more_than_the_mean(program: Path, tokens: int, rows: int, most: int) -> None:
    ((_, _, _, busiest, total, clusters),) = counted(program, [(tokens, rows, 132)])
    assert clusters == 66
    assert total / clusters <= busiest <= most
