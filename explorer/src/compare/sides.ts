// The settings of two samplers: how they begin, change places, and go to the library.

export type SideName = "a" | "b";
export type Order = "hf" | "llama.cpp";
export const ORDERS: readonly Order[] = ["hf", "llama.cpp"];

/** Settings of a sampler, by the names that the page's arithmetic has for them. */
export interface Options {
  readonly temperature: number;
  /** 0: all. */
  readonly topK: number;
  readonly topP: number;
  readonly minP: number;
  readonly order: Order;
}

// A is the narrower one at first: then KL(A ‖ B) is finite.
export const AT_FIRST: Record<SideName, Options> = {
  a: { temperature: 0.7, topK: 0, topP: 0.9, minP: 0, order: "hf" },
  b: { temperature: 1, topK: 0, topP: 1, minP: 0, order: "hf" },
};

/** Their names in the address, without the letter of the side. */
export const NAMES: Record<keyof Options, string> = { temperature: "t", topK: "k", topP: "p", minP: "m", order: "o" };

/** The library's names, without what does nothing. */
export function libraryOptions(options: Options): Record<string, number | string> {
  const { temperature, topK, topP, minP, order } = options;
  return {
    ...(temperature === 1 ? {} : { temperature }),
    ...(topK === 0 ? {} : { top_k: topK }),
    ...(topP === 1 ? {} : { top_p: topP }),
    ...(minP === 0 ? {} : { min_p: minP }),
    ...(order === "hf" ? {} : { order }),
  };
}

/** What the address must say for both samplers to change places. */
export function swapped(a: Options, b: Options): Record<string, string | null> {
  const said = (side: SideName, options: Options): [string, string | null][] =>
    (Object.keys(NAMES) as (keyof Options)[]).map((name) => [
      `${NAMES[name]}${side}`,
      options[name] === AT_FIRST[side][name] ? null : String(options[name]),
    ]);
  return Object.fromEntries([...said("a", b), ...said("b", a)]);
}
