// The pages by path. A new page needs an entry here, one in the server's PAGES, and a name in en/zh.json.

import type { JSX } from "preact";
import { ComparePage } from "./compare/comparePage";
import { GlossaryPage } from "./glossary/glossaryPage";
import type { Strings } from "./i18n/strings";
import { LearnPage } from "./learn/learnPage";
import { LensPage } from "./lens/lensPage";
import { NextPage } from "./next/nextPage";
import { TextPage } from "./text/textPage";
import { TrainPage } from "./train/trainPage";

export interface PageInfo {
  readonly path: string;
  readonly name: keyof Strings["pages"];
  /** Whether it needs an open model. */
  readonly needsModel: boolean;
  readonly View: () => JSX.Element;
}

/** In the order of the menu; "/" opens the first one that can be shown. */
export const PAGES: readonly PageInfo[] = [
  { path: "/next", name: "next", needsModel: true, View: NextPage },
  { path: "/learn", name: "learn", needsModel: false, View: LearnPage },
  { path: "/text", name: "text", needsModel: true, View: TextPage },
  { path: "/lens", name: "lens", needsModel: true, View: LensPage },
  { path: "/compare", name: "compare", needsModel: true, View: ComparePage },
  { path: "/train", name: "train", needsModel: false, View: TrainPage },
  { path: "/glossary", name: "glossary", needsModel: false, View: GlossaryPage },
];
