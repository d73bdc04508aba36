// The Layers page: the logit lens of a text.

import type { JSX } from "preact";
import { useContext, useMemo } from "preact/hooks";
import { Legend } from "../heat/legend";
import { fill, useStrings } from "../i18n/strings";
import { Models } from "../models";
import { Choice, Switch } from "../ui/controls";
import { ExportPanel } from "../ui/exportPanel";
import { grouped } from "../ui/format";
import { Alarm, Prose } from "../ui/prose";
import { PromptForm, useDraft } from "../ui/promptForm";
import { Status } from "../ui/requestStatus";
import { usePromptParam } from "../text/usePromptParam";
import { change, flag, integer, oneOf, useParam, type Codec } from "../url";
import { CellPanel } from "./cell";
import { lensDocument, lensLive, lensLines, lensTable } from "./lensExport";
import { Grid, scrollToStart, type At } from "./grid";
import { legendOf, MEASURES, scaleOf, textOfToken, type Measure } from "./lensMeasures";
import { visible } from "../ui/tokenText";
import { Numbers } from "./lensTable";
import { Target } from "./target";
import { useLens } from "./useLens";

/** "layer.position"; null for the last cell, the model's own prediction. */
const place: Codec<At | null> = {
  initial: null,
  parse: (shown) => {
    const [row, column] = /^(\d{1,4})\.(\d{1,4})$/.exec(shown)?.slice(1).map(Number) ?? [];
    return row === undefined || column === undefined ? undefined : [row, column];
  },
  show: (value) => value?.join(".") ?? "",
};

export function LensPage(): JSX.Element {
  const {
    lens: s,
    text: { textUnavailable },
    common,
  } = useStrings();
  const models = useContext(Models);
  const known = models.map(({ name }) => name);
  const [name] = useParam("model", oneOf(known[0] ?? "", known));
  const model = models.find((one) => one.name === name);
  const field = usePromptParam(model);
  const { text: prompt, to } = field;
  const draft = useDraft(field);
  const [target] = useParam("target", integer(-1, 0, 2 ** 31));
  const [measure, setMeasure] = useParam("by", oneOf<Measure>("p", MEASURES));
  const [figures, setFigures] = useParam("figures", flag(true));
  const [cell] = useParam("cell", place);
  const fixedTarget = target < 0 ? null : target;
  const request = useLens(name, prompt, fixedTarget);
  const lens = request.error && !request.current ? undefined : request.data;
  const vocabSize = model?.vocab_size ?? 2;
  const scale = useMemo(() => (lens ? scaleOf(lens, vocabSize) : undefined), [lens, vocabSize]);
  const corner: At = [(lens?.layers.length ?? 1) - 1, (lens?.prompt.length ?? 1) - 1];
  const inside = cell !== null && cell[0] <= corner[0] && cell[1] <= corner[1];
  const at = inside ? cell : corner;
  const own = to(prompt ?? "");
  const choose = (where: At): void => change({ ...own, cell: place.show(where) });
  const setTarget = (id: number | null): void => change({ ...own, target: id === null ? null : String(id) });

  return (
    <div class="lens">
      <header class="intro">
        <h1>{s.title}</h1>
        <Prose text={fill(s.lead, { model: name })} />
      </header>
      <PromptForm
        name="prompt"
        label={s.prompt}
        button={s.look}
        draft={draft}
        onSubmit={(given) => {
          if (given !== prompt) change({ ...to(given), cell: null });
          else if (request.error) request.retry();
          else change(to(given));
        }}
      />
      {prompt === undefined ? <Alarm>{textUnavailable}</Alarm> : null}
      <Status request={request} waiting={s.waiting} />
      {lens && scale ? (
        <div class={request.current && !draft.edited ? "" : "stale"}>
          <div class="settings-row">
            <Choice
              name="by"
              label={s.by}
              value={measure}
              options={MEASURES.map((one) => [one, s.measures[one]] as const)}
              onChoose={setMeasure}
            />
            <Switch name="figures" label={s.figures} on={figures} onFlip={setFigures} />
          </div>
          <p class="note">{s.explain[measure]}</p>
          <Legend title={s.legend} steps={legendOf(measure, scale)} notes={[s.hit]} />
          <div class="look">
            <div class="main">
              <Grid
                lens={lens}
                scale={scale}
                measure={measure}
                figures={figures}
                chosen={at}
                picked={inside}
                onChoose={choose}
              />
              <p class="note">{fill(s.size, { layers: lens.layers.length, positions: grouped(lens.prompt.length) })}</p>
              <Numbers lens={lens} measure={measure} />
              <Target model={name} token={fixedTarget === null ? undefined : lens.targets[0]} onTarget={setTarget} />
            </div>
            <CellPanel lens={lens} scale={scale} measure={measure} at={at} onTarget={setTarget} />
          </div>
          {model && prompt !== undefined && request.current && !request.loading ? (
            <div onClickCapture={scrollToStart}>
              <ExportPanel
                name="lens"
                title={s.title}
                document={() => lensDocument(model, lens)}
                tables={() => [lensTable(lens, s.table)]}
                charts='[data-chart="legend"], [data-chart="grid"] table, [data-chart="climb"] svg'
                live={() => lensLive(lens, scale, measure, s)}
                besideLive='[data-chart="climb"] svg'
                about={{
                  models: [name],
                  prompt,
                  settings: [
                    `${s.by}${common.colon}${s.measures[measure]}`,
                    ...(fixedTarget === null
                      ? []
                      : [`${s.target}${common.colon}${visible(textOfToken(lens.targets[0]))}`]),
                  ].join(", "),
                }}
                lines={(where) => lensLines(where(name), prompt, fixedTarget === null ? undefined : lens.targets[0])}
              />
            </div>
          ) : null}
        </div>
      ) : null}
    </div>
  );
}
