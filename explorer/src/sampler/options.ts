// The sampler's options and stages: names, ranges and orders are those of `lmhead.Sampler`.
//
// A stage is active if its first option differs from the value at which it does nothing (`neutral`).

import type { Codec } from "../url";

export interface OptionInfo {
  /** The name in the address. */
  readonly param: string;
  /** Library default; for an option that switches a stage on, the value at which it does nothing. */
  readonly neutral: number;
  readonly low: number;
  readonly high: number;
  readonly step: number;
  /** Set when its stage is switched on. */
  readonly example: number;
  readonly integer?: true;
}

const option = (
  param: string,
  neutral: number,
  low: number,
  high: number,
  step: number,
  example: number,
): OptionInfo => ({ param, neutral, low, high, step, example, ...(step === 1 ? { integer: true } : {}) });

const TABLE = {
  temperature: option("t", 1, 0.05, 3, 0.05, 0.7),
  dynatemp_range: option("dyn", 0, 0, 2, 0.05, 0.3),
  dynatemp_exponent: option("dynexp", 1, 0.1, 5, 0.1, 1),
  top_k: option("k", 0, 0, 200, 1, 40),
  top_p: option("p", 1, 0, 1, 0.01, 0.9),
  min_p: option("m", 0, 0, 1, 0.01, 0.05),
  top_h: option("toph", 0, 0, 1, 0.01, 0.4),
  typical_p: option("typ", 1, 0.01, 1, 0.01, 0.9),
  epsilon_cutoff: option("epsilon", 0, 0, 0.1, 0.0001, 0.0009),
  eta_cutoff: option("eta", 0, 0, 0.1, 0.0001, 0.002),
  top_n_sigma: option("sigma", 0, 0, 5, 0.05, 1),
  xtc_probability: option("xtc", 0, 0, 1, 0.01, 0.5),
  xtc_threshold: option("xtct", 0.1, 0, 0.5, 0.01, 0.1),
  mirostat: option("miro", 0, 0, 2, 1, 2),
  mirostat_tau: option("tau", 5, 0, 10, 0.1, 5),
  mirostat_eta: option("mirolr", 0.1, 0, 1, 0.01, 0.1),
  repetition_penalty: option("rep", 1, 0.5, 2, 0.05, 1.2),
  frequency_penalty: option("freq", 0, -2, 2, 0.1, 0.5),
  presence_penalty: option("pres", 0, -2, 2, 0.1, 0.5),
  dry_multiplier: option("dry", 0, 0, 5, 0.1, 0.8),
  dry_base: option("drybase", 1.75, 1, 4, 0.05, 1.75),
  dry_allowed_length: option("drylen", 2, 1, 20, 1, 2),
};

export type OptionName = keyof typeof TABLE;
export const OPTIONS: Readonly<Record<OptionName, OptionInfo>> = TABLE;
export const OPTION_NAMES = Object.keys(OPTIONS) as OptionName[];

/** All options with their values. */
export type Options = Readonly<Record<OptionName, number>>;

export const NEUTRAL = Object.fromEntries(OPTION_NAMES.map((name) => [name, OPTIONS[name].neutral])) as Options;

/** The options of each stage; the first ones decide whether it is active. */
const OPTIONS_OF_STAGES = {
  repetition_penalty: ["repetition_penalty"],
  frequency_penalty: ["frequency_penalty", "presence_penalty"],
  dry_multiplier: ["dry_multiplier", "dry_base", "dry_allowed_length"],
  temperature: ["temperature", "dynatemp_range", "dynatemp_exponent"],
  top_n_sigma: ["top_n_sigma"],
  top_h: ["top_h"],
  top_k: ["top_k"],
  top_p: ["top_p"],
  min_p: ["min_p"],
  typical_p: ["typical_p"],
  epsilon_cutoff: ["epsilon_cutoff"],
  eta_cutoff: ["eta_cutoff"],
  xtc_probability: ["xtc_probability", "xtc_threshold"],
  mirostat: ["mirostat", "mirostat_tau", "mirostat_eta"],
} as const;

export type StageName = keyof typeof OPTIONS_OF_STAGES;
export const STAGE_OPTIONS: Readonly<Record<StageName, readonly OptionName[]>> = OPTIONS_OF_STAGES;

const SWITCHES: Partial<Record<StageName, readonly OptionName[]>> = {
  frequency_penalty: ["frequency_penalty", "presence_penalty"],
  temperature: ["temperature", "dynatemp_range"],
};

/** The options that switch a stage on. */
export function switchesOf(stage: StageName): readonly OptionName[] {
  return SWITCHES[stage] ?? [stage];
}

export type OrderName = "hf" | "vllm" | "llama.cpp";

/** A test compares them with `lmhead.sampling.stage_order`. */
export const ORDERS: Readonly<Record<OrderName, readonly StageName[]>> = {
  hf: split(`repetition_penalty frequency_penalty dry_multiplier temperature top_n_sigma top_h top_k top_p min_p
    typical_p epsilon_cutoff eta_cutoff xtc_probability mirostat`),
  vllm: split(`repetition_penalty frequency_penalty dry_multiplier temperature min_p top_n_sigma top_h top_k top_p
    typical_p epsilon_cutoff eta_cutoff xtc_probability mirostat`),
  "llama.cpp": split(`repetition_penalty frequency_penalty dry_multiplier top_n_sigma top_k top_h typical_p top_p min_p
    epsilon_cutoff eta_cutoff xtc_probability temperature mirostat`),
};

export const ORDER_NAMES = Object.keys(ORDERS) as OrderName[];
export const STAGES = ORDERS.hf;

/** Names that are separated by spaces. */
export function split<T extends string = StageName>(names: string): readonly T[] {
  return names.split(/\s+/) as T[];
}

/** The program whose order this is; undefined for an order of the user's own. */
export function orderName(stages: readonly StageName[]): OrderName | undefined {
  return ORDER_NAMES.find((name) => ORDERS[name].join() === stages.join());
}

export interface Stage {
  readonly name: StageName;
  readonly options: Options;
}

export function isActive(stage: StageName, options: Options): boolean {
  return switchesOf(stage).some((name) => options[name] !== OPTIONS[name].neutral);
}

/** The active stages, in order. */
export function activeStages(options: Options, order: readonly StageName[]): Stage[] {
  return order.filter((name) => isActive(name, options)).map((name) => ({ name, options }));
}

const NO_CUT: readonly StageName[] = ["repetition_penalty", "frequency_penalty", "dry_multiplier", "temperature"];

export type Problem = { readonly code: "mirostat_last" | "mirostat_alone"; readonly stage: StageName };

/** Why `lmhead.Sampler` would refuse this chain; undefined if it would not. */
export function problemOf(stages: readonly Stage[]): Problem | undefined {
  const at = stages.findIndex(({ name }) => name === "mirostat");
  if (at < 0) return undefined;
  const after = stages[at + 1];
  if (after) return { code: "mirostat_last", stage: after.name };
  const cut = stages.slice(0, at).find(({ name }) => !NO_CUT.includes(name));
  return cut && { code: "mirostat_alone", stage: cut.name };
}

/** The chain without a stage that the library would refuse. */
export function legalStages(stages: readonly Stage[]): readonly Stage[] {
  return problemOf(stages) ? stages.filter(({ name }) => name !== "mirostat") : stages;
}

/** "hf", or the names of all stages with commas between them. */
export const orderCodec: Codec<readonly StageName[]> = {
  initial: STAGES,
  parse: (text) => {
    if (text in ORDERS) return ORDERS[text as OrderName];
    const names = text.split(",") as StageName[];
    const known = names.every((name) => STAGES.includes(name));
    return known && names.length === STAGES.length && new Set(names).size === names.length ? names : undefined;
  },
  show: (order) => orderName(order) ?? order.join(),
};

/** What `lmhead.Sampler` is given. */
export type LibraryOptions = Record<string, number | string | readonly string[]>;

/** The options of active stages that are not the library's defaults; with `order`, or `stages` for another one. */
export function libraryOptions(stages: readonly Stage[], order: readonly StageName[], seed: number): LibraryOptions {
  const name = orderName(order);
  return {
    ...givenOptions(stages),
    ...(name ? { order: name } : { stages: stages.map((stage) => stage.name) }),
    seed,
  };
}

/** The options of active stages that are not the library's defaults, in the library's order. */
export function givenOptions(stages: readonly Stage[]): Record<string, number> {
  const of = new Map(stages.map((stage) => [stage.name, stage.options]));
  return Object.fromEntries(
    OPTION_NAMES.flatMap((name) => {
      const value = of.get(STAGE_OF[name])?.[name];
      return value === undefined || value === OPTIONS[name].neutral ? [] : [[name, value]];
    }),
  );
}

const STAGE_OF = Object.fromEntries(
  Object.entries(STAGE_OPTIONS).flatMap(([stage, options]) => options.map((option) => [option, stage])),
) as Readonly<Record<OptionName, StageName>>;
