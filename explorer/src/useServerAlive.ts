// Whether the server responds: checked now and then while the page is visible.

import { useEffect, useState } from "preact/hooks";

const [OFTEN_MS, RARELY_MS] = [3000, 15_000];

export function useServerAlive(): boolean {
  const [alive, setAlive] = useState(true);
  useEffect(() => {
    let timer = 0;
    let ended = false;
    const check = async (): Promise<void> => {
      clearTimeout(timer);
      if (document.hidden) return;
      const found = await fetch("/api/models", { method: "GET" }).then(
        () => true,
        () => false,
      );
      if (ended) return;
      setAlive(found);
      timer = window.setTimeout(() => void check(), found ? RARELY_MS : OFTEN_MS);
    };
    const visible = (): void => void check();
    timer = window.setTimeout(() => void check(), RARELY_MS);
    document.addEventListener("visibilitychange", visible);
    return () => {
      ended = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", visible);
    };
  }, []);
  return alive;
}
