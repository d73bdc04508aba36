// The page's arithmetic against the textbook's.
import { expect, test } from "vitest";
import { LIMIT, naive, stable, toHalf } from "../src/math/floatFormats";
import { uniform } from "../src/math/philox";
import { layerNorm, linear, sigmoid } from "../src/math/linear";
import * as s from "../src/math/softmax";
import { huffman, leafProbability, paths } from "../src/math/huffman";
import { processed } from "../src/sampler/process";
import { Row } from "../src/sampler/row";
import { COUNTS, FORKS, HIDDEN, WEIGHT } from "../src/learn/toyModel";
import { expectClose, golden } from "./golden";

test("the toy model is the one of `lmhead demo`", () => {
  expect(HIDDEN).toEqual(golden.hidden);
  expect(WEIGHT).toEqual(golden.weight);
  expect(COUNTS).toEqual(golden.tree.counts);
  expect(FORKS).toEqual(golden.tree.forks);
});

test("linear layer and layer norm", () => {
  for (const { x, y } of golden.linear) expectClose(linear(x, WEIGHT), y);
  for (const { x, y } of golden.layer_norm) expectClose(layerNorm(x), y);
});

test("softmax, log-softmax, entropy", () => {
  for (const { z, t, p, entropy } of golden.softmax) {
    expectClose(s.softmax(z, t), p);
    expectClose([s.entropy(z.map((x: number) => x / t))], [entropy]);
  }
  for (const { z, y } of golden.log_softmax) expectClose(s.logSoftmax(z), y);
});

test("plain normalisation and sigmoid", () => {
  for (const { x, y } of golden.normalize) expectClose(s.normalize(x), y);
  for (const { x, y } of golden.sigmoid) expectClose(x.map(sigmoid), y);
});

test("float32 and float16 overflow where NumPy's do", () => {
  for (const { z, format, exponentials, naive: p, stable: q } of golden.formats) {
    const tolerance = format === "fp32" ? 1e-6 : 2e-3;
    expectClose(naive(z, format).exponentials, exponentials, tolerance);
    expectClose(naive(z, format).p, p, tolerance);
    expectClose(stable(z, format).p, q, tolerance);
  }
  expect(LIMIT.fp32).toBeCloseTo(88.72, 2);
  expect(toHalf(65519)).toBe(65504);
  expect(toHalf(65520)).toBe(Infinity);
  expect(toHalf(2049)).toBe(2048); // a tie: to even
  expect(toHalf(2 ** -24)).toBe(2 ** -24);
  expect(toHalf(2 ** -26)).toBe(0);
});

test("Philox noise, to the last bit", () => {
  for (const { seed, position, id, stream, u } of golden.noise) expect(uniform(seed, position, id, stream)).toBe(u);
});

test("a seeded draw is the package's draw", () => {
  for (const { z, seed, tokens } of golden.draws) {
    const row = new Row(Float64Array.from(z as number[]));
    const found = processed(row, {});
    const draw = (_: number, at: number): number => row.ids[found.drawAt(seed, at)] ?? -1;
    expect(tokens.map(draw)).toEqual(tokens);
  }
});

test("loss, gradient, one step", () => {
  for (const { z, target, smoothing, loss, gradient } of golden.loss) {
    expectClose([s.crossEntropy(z, target, smoothing)], [loss]);
    expectClose(s.crossEntropyGradient(z, target, smoothing), gradient);
  }
  for (const { target, smoothing, rate, weight, before } of golden.step) {
    const z = linear(HIDDEN, WEIGHT);
    expectClose([s.crossEntropy(z, target, smoothing)], [before]);
    const gradient = s.crossEntropyGradient(z, target, smoothing);
    const after = s.stepDown(WEIGHT, HIDDEN, gradient, rate);
    after.forEach((row, v) => expectClose(row, weight[v]));
  }
});

test("the tree and its leaves", () => {
  const found = paths(huffman(COUNTS));
  golden.tree.paths.forEach((path: [number, number][], word: number) => {
    const ours = found.get(word) ?? [];
    expect(ours.map((turn) => [turn.fork, turn.sign])).toEqual(path);
    expectClose([leafProbability(ours, HIDDEN, FORKS)], [golden.tree.p[word]]);
  });
});
