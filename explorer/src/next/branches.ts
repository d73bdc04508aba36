// Branches: several continuations of one prompt, each a list of token ids; one is the current one.
//
// In the address, `more` is the current branch and `branches` the others around it: "5,6.*.7" are three,
// with the current one (the star) in the middle. A single branch has no `branches`.

export type Path = readonly number[];

export interface Branches {
  readonly all: readonly Path[];
  readonly current: number;
}

export const MAX_BRANCHES = 12;
const HERE = "*";

export function path({ all, current }: Branches): Path {
  return all[current] ?? [];
}

/** Replace the current branch. */
export function goTo(branches: Branches, to: Path): Branches {
  return { ...branches, all: branches.all.map((one, at) => (at === branches.current ? to : one)) };
}

/** Add a branch after the current one and make it the current one. */
export function fork({ all, current }: Branches, to: Path): Branches {
  return { all: [...all.slice(0, current + 1), to, ...all.slice(current + 1)], current: current + 1 };
}

export function open(branches: Branches, current: number): Branches {
  return { ...branches, current };
}

/** Remove a branch; if it was the current one, its neighbour becomes it. */
export function close({ all, current }: Branches, which: number): Branches {
  const left = all.filter((_, at) => at !== which);
  return { all: left, current: Math.min(which < current ? current - 1 : current, left.length - 1) };
}

/** Parse from the address; an invalid text gives a single branch. */
export function parse(more: string | null, branches: string | null): Branches {
  const here = ids(more ?? "") ?? [];
  const parts = (branches ?? HERE).split(".");
  const current = parts.indexOf(HERE);
  const all = parts.map((part) => (part === HERE ? here : ids(part)));
  const read = all.every((one) => one !== undefined) && parts.filter((part) => part === HERE).length === 1;
  return read && all.length <= MAX_BRANCHES ? { all: all, current } : { all: [here], current: 0 };
}

/** Write for the address; null for what is not needed. */
export function show({ all, current }: Branches): { more: string | null; branches: string | null } {
  const parts = all.map((one, at) => (at === current ? HERE : one.join()));
  return { more: (all[current] ?? []).join() || null, branches: all.length > 1 ? parts.join(".") : null };
}

function ids(text: string): number[] | undefined {
  if (text === "") return [];
  const read = text.split(",");
  return read.every((part) => /^\d{1,9}$/.test(part)) ? read.map(Number) : undefined;
}
