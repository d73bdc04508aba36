// Request the logit lens when model, prompt or target change.

import { post } from "../api";
import { useRequest, type RequestState } from "../useRequest";
import type { Lens } from "./lensMeasures";

/** Top tokens per cell. */
export const TOP = 8;

export function useLens(model: string, prompt: string | undefined, target: number | null): RequestState<Lens> {
  const key = prompt === undefined ? undefined : `lens ${JSON.stringify([model, prompt, target])}`;
  return useRequest(key, async (signal) => {
    const response = await post("/api/lens", { model, prompt, target, top: TOP }, signal);
    return (await response.json()) as Lens;
  });
}
