// The texts of the pages. `Strings` is the type of en.json; the compiler checks zh.json against it.

import { createContext } from "preact";
import { useContext } from "preact/hooks";
import en from "./en.json";
import zh from "./zh.json";

export type Lang = "en" | "zh";
export type Strings = typeof en;

export const LANGUAGES: Record<Lang, { name: string; strings: Strings; tag: string }> = {
  en: { name: "English", strings: en, tag: "en" },
  zh: { name: "中文", strings: zh, tag: "zh-Hans" },
};

export function preferredLanguage(): Lang {
  return navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

export const Language = createContext<Lang>("en");

export function useStrings(): Strings {
  return LANGUAGES[useContext(Language)].strings;
}

/** "{n} left" with { n: 3 } is "3 left". */
export function fill(text: string, values: Record<string, string | number>): string {
  return text.replace(/\{(\w+)\}/g, (whole, name: string) => String(values[name] ?? whole));
}
