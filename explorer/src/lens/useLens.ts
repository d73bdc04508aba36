// The server's lens of a prompt: asked when model, prompt or target change, given up when they do.

import { post } from "../ask";
import { useAsked, type Asked } from "../asked";
import type { Lens } from "./measures";

/** Best words per cell. */
export const WORDS = 8;

export function useLens(model: string, prompt: string | undefined, target: number | null): Asked<Lens> {
  const key = prompt === undefined ? undefined : JSON.stringify([model, prompt, target]);
  return useAsked(key, async (signal) => {
    const response = await post("/api/lens", { model, prompt, target, top: WORDS }, signal);
    return (await response.json()) as Lens;
  });
}
