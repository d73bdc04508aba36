// The models that the server was given; none, if it was given none or has not said yet.

import { createContext } from "preact";
import type { Model } from "./ask";

export const Models = createContext<readonly Model[]>([]);

/** Of the lmhead that serves the page. */
export const Version = createContext("");
