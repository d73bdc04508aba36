// Request the logit lens when model, prompt or target change.

import { postStream } from "../api";
import { useRequest, type RequestState } from "../useRequest";
import type { Lens } from "./lensMeasures";

/** Top tokens per cell. */
export const TOP = 8;

export function useLens(model: string, prompt: string | undefined, target: number | null): RequestState<Lens> {
  const key = prompt === undefined ? undefined : `lens ${JSON.stringify([model, prompt, target])}`;
  return useRequest(key, async (signal, partial) => {
    let rows = 0;
    const counted = (lens: Lens): Lens => ({ ...lens, rows });
    const lens = await postStream<Lens>("/api/lens", { model, prompt, target, top: TOP }, signal, (some, progress) => {
      rows = progress?.all ?? rows;
      if (some.layers.length) partial(counted(some), progress);
    });
    return counted(lens);
  });
}
