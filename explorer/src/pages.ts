// The pages, by their address. A new page is a line here, one in the server, and a name in en/zh.json.

import type { JSX } from "preact";
import type { Strings } from "./i18n";
import { ComparePage } from "./compare";
import { LearnPage } from "./learn";
import { LensPage } from "./lens";
import { NextPage } from "./next";
import { TextPage } from "./text";
import { TrainPage } from "./train";

export interface PageInfo {
  readonly path: string;
  readonly name: keyof Strings["pages"];
  /** Whether it has something to show only where the server was given a model. */
  readonly needsModel: boolean;
  readonly View: () => JSX.Element;
}

export const PAGES: readonly PageInfo[] = [
  { path: "/", name: "learn", needsModel: false, View: LearnPage },
  { path: "/next", name: "next", needsModel: true, View: NextPage },
  { path: "/text", name: "text", needsModel: true, View: TextPage },
  { path: "/lens", name: "lens", needsModel: true, View: LensPage },
  { path: "/compare", name: "compare", needsModel: true, View: ComparePage },
  { path: "/train", name: "train", needsModel: false, View: TrainPage },
];
