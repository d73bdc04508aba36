// The Train page: the memory of the loss, and a training run.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { ExportPanel } from "../ui/exportPanel";
import { Cost, useSizes } from "./memoryStep";
import { trainAbout, trainDocument, trainLines, trainTables } from "./trainExport";
import { useRun } from "./useRun";
import { Watch } from "./watchRun";

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
      {watched.run ? (
        <>
          <Watch watched={watched} />
          <Cost given={given} />
        </>
      ) : watched.run === null || watched.failed !== undefined ? (
        <>
          <Cost given={given} />
          <Watch watched={watched} />
        </>
      ) : null}
      <ExportPanel
        name="train"
        title={s.title}
        document={() => trainDocument(given.sizes, watched.run)}
        tables={() => trainTables(given.sizes, watched.run, s)}
        charts='[data-chart="memory"], .chart > svg'
        lines={() => trainLines(given.sizes, watched.run)}
        about={trainAbout(given.sizes, watched.run)}
      />
    </div>
  );
}
