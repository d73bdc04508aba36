// The pages, by the last part of their address. A new page is a line here and a name in en/zh.json.

import type { JSX } from "preact";
import type { Strings } from "./i18n";
import { LearnPage } from "./learn";

export const PAGES: readonly { readonly path: string; readonly name: keyof Strings["pages"]; readonly View: () => JSX.Element }[] = [
  { path: "/", name: "learn", View: LearnPage },
];
