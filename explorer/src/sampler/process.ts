// A row after a sampler: every stage in turn, what each leaves, and the token that is drawn.

import { gumbel, uniform } from "../math/philox";
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
import {
  activeStages,
  legalStages,
  NEUTRAL,
  ORDERS,
  STAGE_OPTIONS,
  type Options,
  type Stage,
  type StageName,
} from "./options";
import {
  countedIds,
  countPenalty,
  dryPenalty,
  repeatedIds,
  repetitionPenalty,
  type Context,
  type Counting,
  type Edit,
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
  /** The last rank of the model (from 0) that is left. */
  readonly lastRank: number;
  /** By the model's rank: index among those left, plus 1; or minus the number of the step that removed it. */
  private readonly where: Int32Array;
  private byId: Float64Array | undefined;

  constructor(
    private readonly row: Row,
    stages: readonly Stage[],
    situation: Situation = NOTHING,
  ) {
    this.where = new Int32Array(row.ids.length);
    const applied = appliedStages(row, legalStages(stages), situation);
    applied.forEach(({ before, after }, at) => {
      if (after.size < before.size) this.mark(before.ranks, after.ranks, -1 - at);
    });
    this.steps = applied.map(({ step }) => step);
    this.left = applied.at(-1)?.after ?? row.candidates;
    const { ranks } = this.left;
    let last = 0;
    for (let at = 0; at < ranks.length; at++) {
      const rank = ranks[at] as number;
      this.where[rank] = at + 1;
      if (rank > last) last = rank;
    }
    this.lastRank = last;
  }

  /** How many tokens are left. */
  get kept(): number {
    return this.left.size;
  }

  get entropy(): number {
    return this.left.entropy;
  }

  /** The ids of the tokens that are left, the n best ones first. */
  ids(n = this.kept): number[] {
    return this.best(n).map((rank) => this.row.ids[rank] as number);
  }

  /** The probability by token id; 0 for those that were removed. */
  get probability(): Float64Array {
    return (this.byId ??= this.left.probability());
  }

  /** The probability of the token at a rank of the model (from 0); 0 if it was removed. */
  p(rank: number): number {
    const place = this.where[rank] ?? 0;
    return place > 0 ? this.left.p(place - 1) : 0;
  }

  /** The probability of a token id; 0 if it was removed. */
  pOf(id: number): number {
    return this.p(this.row.rankOf(id));
  }

  /** The logit of the token at a rank of the model after the sampler; undefined if it was removed. */
  logit(rank: number): number | undefined {
    const place = this.where[rank] ?? 0;
    return place > 0 ? this.left.z[place - 1] : undefined;
  }

  /** The stage that removed the token at a rank of the model. */
  removedAt(rank: number): Step | undefined {
    const place = this.where[rank] ?? 0;
    return place < 0 ? this.steps[-place - 1] : undefined;
  }

  /** The model's ranks of the n best tokens that are left. */
  best(n: number): number[] {
    return [...this.left.ranks.subarray(0, n)];
  }

  /** The model's rank of the token that is drawn with this noise, by rank (`Row.noise`). */
  draw(noise: Float64Array): number {
    const { ranks, z } = this.left;
    let [best, largest] = [0, -Infinity];
    for (let at = 0; at < ranks.length; at++) {
      const sum = (z[at] as number) + (noise[ranks[at] as number] as number);
      if (sum > largest) [best, largest] = [at, sum];
    }
    return ranks[best] as number;
  }

  /** The model's rank of the token that is drawn at a position. */
  drawAt(seed: number, position: number): number {
    if (4 * this.kept > this.row.ids.length) return this.draw(this.row.noise(seed, position));
    // Few tokens are left: the noise of the others is not needed.
    const noise = new Float64Array(this.lastRank + 1);
    for (const rank of this.left.ranks) noise[rank] = gumbel(seed, position, this.row.ids[rank] as number);
    return this.draw(noise);
  }

  /** Note the step that removed tokens; both lists are in the same order. */
  private mark(before: Uint32Array, after: Uint32Array, step: number): void {
    let kept = 0;
    for (let at = 0; at < before.length; at++) {
      const rank = before[at] as number;
      if (rank === after[kept]) kept++;
      else this.where[rank] = step;
    }
  }
}

interface Applied {
  /** Stage, its options, and what else its result depends on. */
  readonly key: string;
  readonly situation: Situation;
  readonly before: Candidates;
  readonly after: Candidates;
  readonly step: Step;
}

/** The last chain that was applied to each row: stages before the first change are not computed again. */
const lastChains = new WeakMap<Row, readonly Applied[]>();

function appliedStages(row: Row, stages: readonly Stage[], situation: Situation): readonly Applied[] {
  const known = lastChains.get(row) ?? [];
  const applied: Applied[] = [];
  let [before, mass] = [row.candidates, 1];
  for (const [at, stage] of stages.entries()) {
    const { name, options } = stage;
    const { prompt, output, counting, seed } = situation;
    const key = [name, ...STAGE_OPTIONS[name].map((option) => options[option]), counting, seed].join();
    const old = known[at];
    let one: Applied;
    if (old?.key === key && old.before === before && old.situation.prompt === prompt && old.situation.output === output)
      one = old;
    else {
      const after = applyStage(stage, before, row, situation);
      if (after.size < before.size) mass = row.mass(after.ranks);
      one = { key, situation, before, after, step: describe(stage, before, after, mass) };
    }
    applied.push(one);
    before = one.after;
    mass = one.step.mass;
  }
  lastChains.set(row, applied);
  return applied;
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

function applyStage({ name, options: o }: Stage, c: Candidates, row: Row, situation: Situation): Candidates {
  const { counting = "hf", seed = 0, prompt, output } = situation;
  const edited = (edits: ReadonlyMap<number, Edit>): Candidates =>
    c.edited(new Map([...edits].map(([id, edit]) => [row.rankOf(id), edit])));
  switch (name) {
    case "repetition_penalty":
      return edited(repetitionPenalty(repeatedIds(situation, counting), o.repetition_penalty));
    case "frequency_penalty":
      return edited(countPenalty(countedIds(situation, counting), o.frequency_penalty, o.presence_penalty));
    case "dry_multiplier":
      return edited(dryPenalty([...prompt, ...output], o.dry_multiplier, o.dry_base, o.dry_allowed_length));
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
      return o.mirostat === 1 ? mirostat1(c, 2 * o.mirostat_tau, row.ids.length) : mirostat2(c, 2 * o.mirostat_tau);
  }
}

/** From T - range to T + range, with the entropy of what is left. */
export function dynamicTemperature(c: Candidates, o: Options): number {
  if (c.size < 2) return o.temperature;
  const [low, high] = [Math.max(0, o.temperature - o.dynatemp_range), o.temperature + o.dynatemp_range];
  const share = Math.min(1, Math.max(0, c.entropy / Math.log(c.size)));
  return Math.max(1e-6, low + (high - low) * share ** o.dynatemp_exponent);
}

function describe({ name, options }: Stage, before: Candidates, after: Candidates, mass: number): Step {
  const removed = before.size - after.size;
  return {
    name: name === "temperature" && options.dynatemp_range > 0 ? "dynatemp_range" : name,
    stage: name,
    left: after.size,
    mass,
    entropy: after.entropy,
    best: after.id(0),
    bestP: after.p(0),
    removed,
    removedMass: removed ? Math.max(0, 1 - after.shareOf(before)) : 0,
  };
}
