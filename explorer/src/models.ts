// Contexts: the open models and the version of lmhead.

import { createContext } from "preact";
import type { Model } from "./api";

export const Models = createContext<readonly Model[]>([]);

/** The version of lmhead that serves the page. */
export const Version = createContext("");
