// The page's state lives in the address: this file reads and writes it.
//
// A drag updates the page at once and the address when it pauses, so that the back button undoes one
// drag or click at a time.

import { useEffect, useState } from "preact/hooks";

const REST_MS = 250;

let path = location.pathname;
let params = normalized(new URLSearchParams(location.search));
let pending: number | undefined;
const listeners = new Set<() => void>();

/** What all pages share. */
const SHARED = ["lang", "theme", "model", "prompt", "held"];
/** What belongs to one prompt and model; dropped when another page has changed them. */
const OF_PROMPT = ["more", "branches", "paths", "at", "cell", "target", "file"];
const STORED = "lmhead:page:";

/** How a value is written in the address; an invalid text gives the default. */
export interface Codec<T> {
  readonly initial: T;
  parse(text: string): T | undefined;
  show(value: T): string;
}

export type Set<T> = (value: T, drag?: boolean) => void;

/** A value of the address and its setter; `useAddress` of the frame redraws the page when it changes. */
export function param<T>(name: string, codec: Codec<T>): [T, Set<T>] {
  const text = params.get(name);
  const value = (text === null ? undefined : codec.parse(text)) ?? codec.initial;
  const set = (next: T, drag = false): void => {
    const shown = codec.show(next);
    write((to) => (shown === codec.show(codec.initial) ? to.delete(name) : to.set(name, shown)), drag);
  };
  return [value, set];
}

export const useParam = param;

/** Change several values as one history entry; null removes. */
export function change(values: Record<string, string | null>): void {
  write((to) => {
    for (const [name, value] of Object.entries(values)) {
      if (value === null) to.delete(name);
      else to.set(name, value);
    }
  }, false);
}

/** Redraw whenever the address changes. */
export function useAddress(): void {
  const [, draw] = useState(0);
  useEffect(() => {
    const again = (): void => draw((n) => n + 1);
    listeners.add(again);
    return () => void listeners.delete(again);
  }, []);
}

/** All names in the address. */
export function names(): string[] {
  return [...params.keys()];
}

/** The settings of this page as text, without the prompt and what all pages share. */
export function settings(): string {
  return [...params].flatMap(([name, value]) => (SHARED.includes(name) ? [] : [`${name}=${value}`])).join(", ");
}

export function currentPath(): string {
  return path;
}

/** The address of a page with the state that it was left in, and the prompt, model and language of this one. */
export function linkTo(page: string): string {
  const to = new URLSearchParams(page === path ? params : (stored(page) ?? ""));
  const same = ["prompt", "held", "model"].every((name) => to.get(name) === params.get(name));
  if (!same) OF_PROMPT.forEach((name) => to.delete(name));
  for (const name of SHARED) {
    const value = params.get(name);
    if (value === null) to.delete(name);
    else to.set(name, value);
  }
  const query = to.toString();
  return page + (query ? `?${query}` : "");
}

/** Open an address of this site without loading the page again. */
export function navigate(address: string): void {
  flush();
  const { pathname, search, hash } = new URL(address, location.href);
  history.pushState(null, "", pathname + search + hash);
  path = pathname;
  params = normalized(new URLSearchParams(search));
  store();
  listeners.forEach((listener) => listener());
  scrollTo({ top: 0, behavior: "instant" });
}

/** Give the current page another path, without a history entry. */
export function replacePath(to: string): void {
  path = to;
  history.replaceState(null, "", path + location.search + location.hash);
  store();
  listeners.forEach((listener) => listener());
}

function write(edit: (to: URLSearchParams) => void, drag: boolean): void {
  const next = new URLSearchParams(params);
  edit(next);
  params = next;
  clearTimeout(pending);
  pending = drag ? window.setTimeout(push, REST_MS) : void push();
  listeners.forEach((listener) => listener());
}

/** Write a pending drag to the address now. */
function flush(): void {
  if (pending === undefined) return;
  clearTimeout(pending);
  push();
}

function push(): void {
  pending = undefined;
  const query = params.toString();
  const address = path + (query ? `?${query}` : "") + location.hash;
  if (address !== location.pathname + location.search + location.hash) history.pushState(null, "", address);
  store();
}

/** Remember the state of this page for links from others. */
function store(): void {
  try {
    sessionStorage.setItem(STORED + path, params.toString());
  } catch {
    // Storage full or not allowed: links then open the page without its saved state.
  }
}

function stored(page: string): string | null {
  try {
    return sessionStorage.getItem(STORED + page);
  } catch {
    return null;
  }
}

/** Earlier versions wrote the prompt of some pages under other names. */
function normalized(read: URLSearchParams): URLSearchParams {
  for (const [old, name] of [
    ["text", "prompt"],
    ["held_prompt", "held"],
  ] as const) {
    const value = read.get(old);
    if (value === null) continue;
    read.delete(old);
    if (!read.has(name)) read.set(name, value);
  }
  return read;
}

addEventListener("popstate", () => {
  clearTimeout(pending);
  pending = undefined;
  path = location.pathname;
  params = normalized(new URLSearchParams(location.search));
  store();
  listeners.forEach((listener) => listener());
});
store();

// Codecs.

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

/** A list of integers, empty by default. */
export const integers: Codec<readonly number[]> = {
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
