// The page of training: what the loss costs in memory, and a run to watch.

import type { JSX } from "preact";
import { useStrings } from "../i18n";
import { Exports } from "../ui/export";
import { Cost, useSizes } from "./cost";
import { trainDocument, trainLines, trainTables } from "./export";
import { useRun } from "./useRun";
import { Watch } from "./watch";

export function TrainPage(): JSX.Element {
  const { train: s } = useStrings();
  const given = useSizes();
  const watched = useRun();
  return (
    <div class="train">
      <header class="intro">
        <h1>{s.title}</h1>
        <p class="lead">{s.lead}</p>
      </header>
      <Cost given={given} />
      <Watch watched={watched} />
      <Exports
        name="train"
        title={s.title}
        document={() => trainDocument(given.sizes, watched.run)}
        tables={() => trainTables(given.sizes, watched.run, s)}
        charts='[data-chart="memory"], .chart > svg'
        lines={() => trainLines(given.sizes, watched.run)}
      />
    </div>
  );
}
