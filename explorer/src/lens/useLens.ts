// The server's lens of a prompt: asked when model, prompt or target change, given up when they do.

import { useEffect, useState } from "preact/hooks";
import { post } from "../ask";
import type { Lens } from "./measures";

/** Best words per cell. */
export const WORDS = 8;

export interface Looking {
  readonly lens: Lens | undefined;
  readonly waiting: boolean;
  readonly failed: string | undefined;
}

export function useLens(model: string, prompt: string, target: number | null): Looking {
  const [looking, setLooking] = useState<Looking>({ lens: undefined, waiting: true, failed: undefined });
  useEffect(() => {
    const stop = new AbortController();
    setLooking(({ lens }) => ({ lens, waiting: true, failed: undefined }));
    post("/api/lens", { model, prompt, target, top: WORDS }, stop.signal)
      .then((response) => response.json() as Promise<Lens>)
      .then(
        (lens) => setLooking({ lens, waiting: false, failed: undefined }),
        (error: Error) => {
          if (!stop.signal.aborted) setLooking({ lens: undefined, waiting: false, failed: error.message });
        },
      );
    return () => stop.abort();
  }, [model, prompt, target]);
  return looking;
}
