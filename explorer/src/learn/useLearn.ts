// The settings of the Learn page, from the address, and the values computed from them.

import { layerNorm, linear, type Vector } from "../math/linear";
import type { Format } from "../math/floatFormats";
import { flag, integer, number, numbers, oneOf, param, type Codec, type Set } from "../url";
import { NEUTRAL, type Stage } from "../sampler/options";
import { Processed } from "../sampler/process";
import { Row } from "../sampler/row";
import { WIDTHS, type Width } from "./initialWeights";
import { HIDDEN, WEIGHT } from "./toyModel";

/** The stages that this page shows. */
export type CardName = "temperature" | "top_k" | "top_p" | "min_p" | "typical_p";

/** A stage with its value; it may be off. */
export interface Card {
  readonly name: CardName;
  readonly value: number;
  readonly on: boolean;
}

export const ORDERS = {
  hf: ["temperature", "top_k", "top_p", "min_p", "typical_p"],
  "llama.cpp": ["top_k", "typical_p", "top_p", "min_p", "temperature"],
} as const satisfies Record<string, readonly CardName[]>;

export type Order = keyof typeof ORDERS;

/** Low, high and step of each stage's slider. */
export const RANGES: Record<CardName, readonly [number, number, number]> = {
  temperature: [0.1, 3, 0.05],
  top_k: [1, 6, 1],
  top_p: [0.05, 1, 0.01],
  min_p: [0, 1, 0.01],
  typical_p: [0.05, 1, 0.01],
};

/** Two stages are on, and their order changes how many words are left. */
export const EXAMPLE: readonly Card[] = [
  { name: "temperature", value: 0.5, on: true },
  { name: "top_k", value: 5, on: false },
  { name: "top_p", value: 0.8, on: true },
  { name: "min_p", value: 0.1, on: false },
  { name: "typical_p", value: 0.9, on: false },
];

export function inOrder(cards: readonly Card[], order: Order): Card[] {
  return ORDERS[order].flatMap((name) => cards.filter((card) => card.name === name));
}

/** The program with this order, if any. */
export function orderOf(cards: readonly Card[]): Order | undefined {
  const names = cards.map((card) => card.name).join();
  return (Object.keys(ORDERS) as Order[]).find((order) => ORDERS[order].join() === names);
}

export function active(cards: readonly Card[]): Card[] {
  return cards.filter((card) => card.on);
}

/** The cards that are on, as stages of a sampler. */
export function stagesOf(cards: readonly Card[]): Stage[] {
  return active(cards).map(({ name, value }) => ({ name, options: { ...NEUTRAL, [name]: value } }));
}

/** "temperature:0.5,top_k:5:off,...": every stage once, in any order. */
export const cardsCodec: Codec<readonly Card[]> = {
  initial: EXAMPLE,
  parse: (text) => {
    const cards = text.split(",").map(parseCard);
    const read = cards.filter((card) => card !== undefined);
    const all = new Set(read.map((card) => card.name));
    return all.size === EXAMPLE.length && cards.length === all.size ? read : undefined;
  },
  show: (cards) => cards.map((c) => `${c.name}:${c.value}${c.on ? "" : ":off"}`).join(),
};

function parseCard(text: string): Card | undefined {
  const [name = "", value = "", off] = text.split(":");
  const known = EXAMPLE.find((card) => card.name === name);
  if (!known || (off !== undefined && off !== "off")) return undefined;
  const [low, high, step] = RANGES[known.name];
  const x = Number(value);
  if (value === "" || !(x >= low && x <= high) || (step === 1 && !Number.isInteger(x))) return undefined;
  return { name: known.name, value: x, on: off === undefined };
}

const DRAWS = ["1", "10", "100", "1000"] as const;
export type Draws = (typeof DRAWS)[number];
export const DRAW_COUNTS: readonly Draws[] = DRAWS;
export const MODELS = ["toy", "smollm2", "gemma3", "llama3"] as const;
export type ModelName = (typeof MODELS)[number];
export const SEEDS = Number.MAX_SAFE_INTEGER;

/** The settings: names in the address, and how values are written there. */
const SETTINGS = {
  h: ["h", numbers(HIDDEN, -3, 3)],
  stretch: ["stretch", number(1, 0.5, 10)],
  norm: ["norm", flag(false)],
  tied: ["tied", oneOf("untied", ["tied", "untied"] as const)],
  model: ["sizes", oneOf<ModelName>("smollm2", MODELS)],
  shift: ["c", number(0, -10, 10)],
  big: ["big", number(3.1, -5, 120)],
  format: ["format", oneOf<Format>("fp32", ["fp32", "fp16"])],
  temperature: ["t", number(1, 0.1, 5)],
  cards: ["chain", cardsCodec],
  seed: ["seed", number(42, 0, SEEDS)],
  draws: ["draws", oneOf<Draws>("10", DRAWS)],
  target: ["target", number(1, 0, 5)],
  smoothing: ["eps", number(0, 0, 0.9)],
  rate: ["rate", number(0.1, 0.01, 0.5)],
  steps: ["steps", number(0, 0, 50)],
  scores: ["x", numbers([1, 2, 3], -5, 5)],
  gamma: ["gamma", number(1, -3, 3)],
  beta: ["beta", number(0, -3, 3)],
  sublayer: ["f", number(0.5, -3, 3)],
  bias: ["bias", number(0, -8, 8)],
  batch: ["batch", integer(2, 1, 8)],
  positions: ["positions", integer(4, 1, 16)],
  changed: ["changed", integer(0, 0, 5)],
  low: ["low", number(-20, -150, 5)],
  width: ["width", oneOf<Width>("64", WIDTHS)],
  initialSeed: ["initseed", integer(0, 0, 2 ** 32 - 1)],
  leaf: ["leaf", number(1, 0, 5)],
} as const;

type Settings = typeof SETTINGS;
type Value<K extends keyof Settings> = Settings[K][1] extends Codec<infer T> ? T : never;
type Values = { readonly [K in keyof Settings]: Value<K> };
type Setters = { readonly [K in keyof Settings as `set${Capitalize<K>}`]: Set<Value<K>> };

export function useLearn() {
  const all = Object.entries(SETTINGS).map(
    ([name, [key, codec]]) => [name, param(key, codec as Codec<unknown>)] as const,
  );
  const values = Object.fromEntries(all.map(([name, [value]]) => [name, value])) as unknown as Values;
  const setters = Object.fromEntries(
    all.map(([name, [, set]]) => [`set${name.charAt(0).toUpperCase()}${name.slice(1)}`, set]),
  ) as unknown as Setters;
  const { h, stretch, norm, cards, seed, target, steps, leaf } = values;
  const given: Vector = h.map((x) => x * stretch);
  const hidden: Vector = norm ? layerNorm(given) : given;
  const logits = linear(hidden, WEIGHT);
  const row = new Row(Float64Array.from(logits));
  const left = new Processed(row, stagesOf(cards));
  return {
    ...values,
    ...setters,
    seed: Math.floor(seed),
    target: Math.floor(target),
    steps: Math.floor(steps),
    leaf: Math.floor(leaf),
    given,
    hidden,
    logits,
    row,
    left,
  };
}

export type Learn = ReturnType<typeof useLearn>;
