// A row after a sampler: every stage in turn, what each leaves, and the token that is drawn.

import { uniform } from "../math/philox";
import type { Candidates } from "./candidates";
import {
  epsilonCutoff,
  etaCutoff,
  excludeTopChoices,
  minP,
  mirostat1,
  mirostat2,
  topH,
  topNSigma,
  topP,
  typicalP,
} from "./filters";
import { activeStages, legalStages, NEUTRAL, ORDERS, type Options, type Stage, type StageName } from "./options";
import {
  countedIds,
  countPenalty,
  dryPenalty,
  repeatedIds,
  repetitionPenalty,
  type Context,
  type Counting,
} from "./penalties";
import type { Row } from "./row";

const COIN_STREAM = 1; // `FOR_COINS` of lmhead.sampling.distribution

/** The distribution after a stage. */
export interface Step {
  readonly name: StageName | "dynatemp_range";
  readonly stage: StageName;
  /** How many tokens are left. */
  readonly left: number;
  /** The model's probability of those. */
  readonly mass: number;
  readonly entropy: number;
  /** The id of the best token, and its probability now. */
  readonly best: number;
  readonly bestP: number;
  /** How many tokens this stage removed, and their probability before it. */
  readonly removed: number;
  readonly removedMass: number;
}

export interface Situation extends Context {
  readonly counting?: Counting;
  readonly seed?: number;
}

const NOTHING: Situation = { prompt: [], output: [] };

export class Processed {
  readonly steps: readonly Step[];
  readonly left: Candidates;
  /** By token id, the number of the step (from 1) that removed it; 0 for none. */
  private readonly removedBy: Uint8Array;
  /** By token id; 0 for those that were removed. */
  readonly probability: Float64Array;

  constructor(
    private readonly row: Row,
    stages: readonly Stage[],
    situation: Situation = NOTHING,
  ) {
    this.removedBy = new Uint8Array(row.ids.length);
    const steps: Step[] = [];
    let now = row.candidates;
    for (const stage of legalStages(stages)) {
      const before = now;
      now = applyStage(stage, before, row.logits.length, situation);
      if (now.size < before.size) this.mark(before, now, steps.length + 1);
      steps.push(describe(stage, before, now, row));
    }
    this.steps = steps;
    this.left = now;
    this.probability = new Float64Array(row.ids.length);
    for (let at = 0; at < now.size; at++) this.probability[now.ids[at] as number] = now.p(at);
  }

  /** How many tokens are left. */
  get kept(): number {
    return this.left.size;
  }

  get entropy(): number {
    return this.left.entropy;
  }

  /** The probability of the token at a rank of the model (from 0); 0 if it was removed. */
  p(rank: number): number {
    return this.probability[this.row.ids[rank] ?? -1] ?? 0;
  }

  /** The probability of a token id; 0 if it was removed. */
  pOf(id: number): number {
    return this.probability[id] ?? 0;
  }

  /** The stage that removed the token at a rank of the model. */
  removedAt(rank: number): Step | undefined {
    const number = this.removedBy[this.row.ids[rank] ?? -1] ?? 0;
    return number ? this.steps[number - 1] : undefined;
  }

  /** The model's ranks of the n best tokens that are left. */
  best(n: number): number[] {
    return Array.from(this.left.ids.subarray(0, n), (id) => this.row.rankOf(id));
  }

  /** The model's rank of the token that is drawn with this noise, by token id. */
  draw(noise: Float64Array): number {
    let [best, largest] = [0, -Infinity];
    for (let at = 0; at < this.left.size; at++) {
      const sum = (this.left.z[at] as number) + (noise[this.left.ids[at] as number] as number);
      if (sum > largest) [best, largest] = [at, sum];
    }
    return this.row.rankOf(this.left.ids[best] as number);
  }

  private mark(before: Candidates, after: Candidates, step: number): void {
    for (const id of before.ids) this.removedBy[id] ||= step;
    for (const id of after.ids) this.removedBy[id] = 0;
  }
}

/** What the options do to a row in the order of a program. */
export function processed(
  row: Row,
  options: Partial<Options>,
  order: readonly StageName[] = ORDERS.hf,
  situation?: Situation,
): Processed {
  return new Processed(row, activeStages({ ...NEUTRAL, ...options }, order), situation);
}

function applyStage({ name, options: o }: Stage, c: Candidates, vocabulary: number, situation: Situation): Candidates {
  const { counting = "hf", seed = 0, prompt, output } = situation;
  switch (name) {
    case "repetition_penalty":
      return c.edited(repetitionPenalty(repeatedIds(situation, counting), o.repetition_penalty));
    case "frequency_penalty":
      return c.edited(countPenalty(countedIds(situation, counting), o.frequency_penalty, o.presence_penalty));
    case "dry_multiplier":
      return c.edited(dryPenalty([...prompt, ...output], o.dry_multiplier, o.dry_base, o.dry_allowed_length));
    case "temperature":
      return c.scaled(o.dynatemp_range > 0 ? dynamicTemperature(c, o) : o.temperature);
    case "top_n_sigma":
      return topNSigma(c, o.top_n_sigma);
    case "top_h":
      return topH(c, o.top_h);
    case "top_k":
      return c.best(o.top_k);
    case "top_p":
      return topP(c, o.top_p);
    case "min_p":
      return minP(c, o.min_p);
    case "typical_p":
      return typicalP(c, o.typical_p);
    case "epsilon_cutoff":
      return epsilonCutoff(c, o.epsilon_cutoff);
    case "eta_cutoff":
      return etaCutoff(c, o.eta_cutoff);
    case "xtc_probability": {
      const coin = uniform(seed, prompt.length + output.length, 0, COIN_STREAM);
      return coin < o.xtc_probability ? excludeTopChoices(c, o.xtc_threshold) : c;
    }
    case "mirostat": // the first token: mu is 2 tau
      return o.mirostat === 1 ? mirostat1(c, 2 * o.mirostat_tau, vocabulary) : mirostat2(c, 2 * o.mirostat_tau);
  }
}

/** From T - range to T + range, with the entropy of what is left. */
export function dynamicTemperature(c: Candidates, o: Options): number {
  if (c.size < 2) return o.temperature;
  const [low, high] = [Math.max(0, o.temperature - o.dynatemp_range), o.temperature + o.dynatemp_range];
  const share = Math.min(1, Math.max(0, c.entropy / Math.log(c.size)));
  return Math.max(1e-6, low + (high - low) * share ** o.dynatemp_exponent);
}

function describe({ name, options }: Stage, before: Candidates, after: Candidates, row: Row): Step {
  let mass = 0;
  for (let at = after.size - 1; at >= 0; at--) mass += row.probability[after.ids[at] as number] as number;
  const removed = before.size - after.size;
  return {
    name: name === "temperature" && options.dynatemp_range > 0 ? "dynatemp_range" : name,
    stage: name,
    left: after.size,
    mass: Math.min(1, mass),
    entropy: after.entropy,
    best: after.ids[0] as number,
    bestP: after.p(0),
    removed,
    removedMass: removed
      ? Math.max(0, 1 - (after.total * Math.exp((after.z[0] as number) - (before.z[0] as number))) / before.total)
      : 0,
  };
}
