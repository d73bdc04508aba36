// The page of training: what the loss costs in memory, and a run to watch.

import type { JSX } from "preact";
import { useStrings } from "../i18n";
import { Cost, useSizes } from "./cost";
import { Watch } from "./watch";

export function TrainPage(): JSX.Element {
  const { train: s } = useStrings();
  const given = useSizes();
  return (
    <div class="train">
      <header class="intro">
        <h1>{s.title}</h1>
        <p class="lead">{s.lead}</p>
      </header>
      <Cost given={given} />
      <Watch />
    </div>
  );
}
