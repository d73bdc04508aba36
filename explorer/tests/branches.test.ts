// Branches: they open, close and come back from the address as they were.
import { expect, test } from "vitest";
import { MAX_BRANCHES, close, fork, goTo, open, parse, path, show, type Branches } from "../src/next/branches";

const THREE: Branches = { all: [[5, 6], [], [7]], current: 1 };

test("the address holds them, and a single one needs none", () => {
  expect(show(THREE)).toEqual({ more: null, branches: "5,6.*.7" });
  expect(show(open(THREE, 0))).toEqual({ more: "5,6", branches: "*..7" });
  for (const which of [0, 1, 2]) {
    const { more, branches } = show(open(THREE, which));
    expect(parse(more, branches)).toEqual(open(THREE, which));
  }
  expect(show({ all: [[1, 2]], current: 0 })).toEqual({ more: "1,2", branches: null });
  expect(parse(null, null)).toEqual({ all: [[]], current: 0 });
  expect(parse("3,1", null)).toEqual({ all: [[3, 1]], current: 0 });
});

test("what is no address of branches is one branch", () => {
  for (const wrong of ["5,6", "*.*", "*.x", "*.-1", "*.1e3", "*.1,", `*${".1".repeat(MAX_BRANCHES)}`])
    expect(parse("4", wrong), wrong).toEqual({ all: [[4]], current: 0 });
  expect(parse("4,x", "*.1")).toEqual({ all: [[], [1]], current: 0 });
});

test("a fork is added after the branch it left, and becomes the current one", () => {
  const forked = fork(THREE, [9]);
  expect(forked).toEqual({ all: [[5, 6], [], [9], [7]], current: 2 });
  expect(path(forked)).toEqual([9]);
  expect(goTo(forked, [9, 9]).all).toEqual([[5, 6], [], [9, 9], [7]]);
});

test("closing one keeps the others, and the current one if it is another", () => {
  expect(close(THREE, 0)).toEqual({ all: [[], [7]], current: 0 });
  expect(close(THREE, 2)).toEqual({ all: [[5, 6], []], current: 1 });
  expect(path(close(THREE, 1))).toEqual([7]);
  expect(path(close(open(THREE, 2), 2))).toEqual([]);
});
