// The state of the page is its address: read here, written here, and nowhere else.
//
// A drag changes the page at once and the address when it rests, so that each rest, and each click,
// is one step for the browser's back button.

import { useEffect, useState } from "preact/hooks";

const REST_MS = 250;

let params = new URLSearchParams(location.search);
let pending: number | undefined;
const listeners = new Set<() => void>();

/** How a value is written in the address. What `parse` cannot read becomes the default. */
export interface Codec<T> {
  readonly initial: T;
  parse(text: string): T | undefined;
  show(value: T): string;
}

export type Set<T> = (value: T, drag?: boolean) => void;

export function useParam<T>(name: string, codec: Codec<T>): [T, Set<T>] {
  const text = params.get(name);
  const value = (text === null ? undefined : codec.parse(text)) ?? codec.initial;
  const set = (next: T, drag = false): void => {
    const shown = codec.show(next);
    write((to) => (shown === codec.show(codec.initial) ? to.delete(name) : to.set(name, shown)), drag);
  };
  return [value, set];
}

/** Several changes as one step; null removes. */
export function change(values: Record<string, string | null>): void {
  write((to) => {
    for (const [name, value] of Object.entries(values))
      value === null ? to.delete(name) : to.set(name, value);
  }, false);
}

/** Draw again whenever the state changes. */
export function useAddress(): void {
  const [, draw] = useState(0);
  useEffect(() => {
    const again = (): void => draw((n) => n + 1);
    listeners.add(again);
    return () => void listeners.delete(again);
  }, []);
}

/** All names in the address now. */
export function names(): string[] {
  return [...params.keys()];
}

function write(edit: (to: URLSearchParams) => void, drag: boolean): void {
  const next = new URLSearchParams(params);
  edit(next);
  params = next;
  clearTimeout(pending);
  pending = drag ? window.setTimeout(push, REST_MS) : void push();
  listeners.forEach((listener) => listener());
}

function push(): void {
  pending = undefined;
  const query = params.toString();
  const address = location.pathname + (query ? `?${query}` : "") + location.hash;
  if (address !== location.pathname + location.search + location.hash) history.pushState(null, "", address);
}

addEventListener("popstate", () => {
  clearTimeout(pending);
  params = new URLSearchParams(location.search);
  listeners.forEach((listener) => listener());
});

// The kinds of values.

export function number(initial: number, low: number, high: number): Codec<number> {
  return {
    initial,
    parse: (text) => inRange(text, low, high),
    show: String,
  };
}

export function integer(initial: number, low: number, high: number): Codec<number> {
  return {
    initial,
    parse: (text) => (Number.isInteger(Number(text)) ? inRange(text, low, high) : undefined),
    show: String,
  };
}

export function flag(initial: boolean): Codec<boolean> {
  return {
    initial,
    parse: (text) => (text === "1" ? true : text === "0" ? false : undefined),
    show: (value) => (value ? "1" : "0"),
  };
}

export function oneOf<T extends string>(initial: T, all: readonly T[]): Codec<T> {
  return { initial, parse: (text) => all.find((value) => value === text), show: String };
}

export function numbers(initial: readonly number[], low: number, high: number): Codec<readonly number[]> {
  return {
    initial,
    parse: (text) => {
      const parts = text.split(",").map((part) => inRange(part, low, high));
      const read = parts.filter((part) => part !== undefined);
      return read.length === initial.length && parts.length === read.length ? read : undefined;
    },
    show: (value) => value.join(","),
  };
}

export function text(initial: string): Codec<string> {
  return { initial, parse: (shown) => shown, show: (value) => value };
}

/** A list of whole numbers, empty at first. */
export const wholes: Codec<readonly number[]> = {
  initial: [],
  parse: (shown) => {
    const read = shown.split(",").map(Number);
    return read.every((x) => Number.isInteger(x) && x >= 0) ? read : undefined;
  },
  show: (value) => value.join(","),
};

function inRange(text: string, low: number, high: number): number | undefined {
  const value = Number(text);
  return text.trim() !== "" && value >= low && value <= high ? value : undefined;
}
