// The sampler's settings as the address holds them, for the pages Next token and Compare.

import { change, integer, number, param, type Codec, type Set } from "../url";
import {
  activeStages,
  legalStages,
  libraryOptions,
  OPTION_NAMES,
  OPTIONS,
  orderCodec,
  orderName,
  problemOf,
  type LibraryOptions,
  type OptionName,
  type Options,
  type OrderName,
  type Problem,
  type Stage,
  type StageName,
} from "./options";
import type { Counting } from "./penalties";

export interface SamplerState {
  readonly options: Options;
  /** All stages in their order, whether active or not. */
  readonly order: readonly StageName[];
  /** The program whose order it is; undefined for an order of the user's own. */
  readonly orderName: OrderName | undefined;
  readonly counting: Counting;
  /** The active stages. */
  readonly stages: readonly Stage[];
  /** Why the library would refuse these stages. */
  readonly problem: Problem | undefined;
  readonly seed: number;
  /** For the server: `Sampler` options, with `stages` for an order of the user's own. */
  readonly library: LibraryOptions;
  set(name: OptionName, value: number, drag?: boolean): void;
  /** Several options as one step in the history. */
  setAll(values: Partial<Options>): void;
  setOrder: Set<readonly StageName[]>;
  setSeed: Set<number>;
}

/** `side` is added to the names in the address; `first` is what a new page starts with. */
export function useSampler(side = "", first: Partial<Options> = {}): SamplerState {
  const codec = (name: OptionName): Codec<number> => {
    const { neutral, low, high, integer: isInteger } = OPTIONS[name];
    return (isInteger ? integer : number)(first[name] ?? neutral, low, high);
  };
  const all = OPTION_NAMES.map((name) => [name, param(OPTIONS[name].param + side, codec(name))] as const);
  const options = Object.fromEntries(all.map(([name, [value]]) => [name, value])) as Options;
  const setters = Object.fromEntries(all.map(([name, [, set]]) => [name, set])) as Record<OptionName, Set<number>>;
  const [order, setOrder] = param(side ? `o${side}` : "order", orderCodec);
  const [seed, setSeed] = param(`seed${side}`, integer(0, 0, Number.MAX_SAFE_INTEGER));
  const name = orderName(order);
  const stages = activeStages(options, order);
  return {
    options,
    order,
    orderName: name,
    counting: name === "llama.cpp" ? "llama.cpp" : "hf",
    stages,
    problem: problemOf(stages),
    seed,
    library: libraryOptions(legalStages(stages), order, seed),
    set: (option, value, drag = false) => setters[option](value, drag),
    setAll: (values) =>
      change(
        Object.fromEntries(
          Object.entries(values).map(([option, value]) => {
            const { param: shown } = OPTIONS[option as OptionName];
            const start = codec(option as OptionName).initial;
            return [shown + side, value === start ? null : String(value)];
          }),
        ),
      ),
    setOrder,
    setSeed,
  };
}
