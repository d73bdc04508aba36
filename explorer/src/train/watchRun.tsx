// A run of `lmhead train`: loss curves, speed and sample text; or how to start one.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { Choice, Slider, optionsOf } from "../ui/controls";
import { fixed, grouped } from "../ui/format";
import { Code, Prose } from "../ui/prose";
import { number, oneOf, useParam } from "../url";
import { shell } from "../export/quote";
import { Chart } from "./chart";
import { at, best, clock, legible, stateOf, thin, timeLeft, type Point, type Run } from "./trainingRun";
import { trainCommand } from "./trainExport";
import type { Watched } from "./useRun";
import { FactRow, Heads } from "../ui/factsTable";

const MAX_POINTS = 800;

export function Watch({ watched }: { watched: Watched }): JSX.Element {
  const { train, common } = useStrings();
  const { watch: s } = train;
  const { run, failed } = watched;
  const begun = run && run.age !== null;
  return (
    <section class="step watch" aria-labelledby="watch-title">
      <div class="text-column">
        <h2 id="watch-title">{s.title}</h2>
        <Prose text={s.text} />
        {begun ? (
          <p class="try">
            <strong>{common.try}</strong> {s.try}
          </p>
        ) : null}
        <p class={failed === undefined ? "note" : "note alarm"} role="status">
          {failed === undefined
            ? run === undefined
              ? s.asking
              : ""
            : fill(s.failed, { message: failed || s.unreachable })}
        </p>
        {begun ? <RunStatus run={run} /> : null}
      </div>
      <div class="play">{begun ? <Curves run={run} /> : run === undefined ? null : <HowTo run={run} />}</div>
    </section>
  );
}

/** Instructions, before there is a run. */
function HowTo({ run }: { run: Run | null }): JSX.Element {
  const { watch: s } = useStrings().train;
  const name = run?.about.name ?? "run";
  const start = trainCommand(name);
  return (
    <div class="panel" data-chart="how">
      <p>{run ? fill(s.absent, { name: run.about.name }) : s.none}</p>
      <Code title={s.command} code={run ? start : `${start}\nlmhead explore --run ${name}`} />
      <p class="note">{s.either}</p>
    </div>
  );
}

function RunStatus({ run }: { run: Run }): JSX.Element {
  const { watch: s } = useStrings().train;
  const state = stateOf(run);
  const left = timeLeft(run);
  const { steps, name, head } = run.about;
  const speed = run.speed.at(-1);
  const lowest = best(run);
  const facts: [string, string, string][] = [
    ["state", s.state, s.states[state]],
    ["step", s.step, steps === null ? grouped(run.step) : fill(s.of, { n: grouped(run.step), all: grouped(steps) })],
    ["left", s.left, state === "done" ? clock(0) : left === undefined ? "—" : clock(left)],
    ["spent", s.spent, clock(run.seconds)],
    ["speed", s.speed, speed ? grouped(Math.round(speed.value)) : "—"],
    ["best", s.best, lowest ? fill(s.at, { x: fixed(lowest.value, 4), n: grouped(lowest.step) }) : "—"],
    ...(head && head !== "full" ? [["head", s.head, head] as [string, string, string]] : []),
  ];
  return (
    <>
      <dl class="standing" data-chart="standing" data-state={state}>
        <div>
          <dt>{s.run}</dt>
          <dd>{name}</dd>
        </div>
        {facts.map(([key, label, value]) => (
          <div key={key} data-fact={key}>
            <dt>{label}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {steps ? <progress value={run.step} max={steps} aria-label={s.step} /> : null}
      {state === "silent" ? (
        <>
          <p>{fill(s.quiet, { time: clock(run.age ?? 0) })}</p>
          <Code title={s.command} code={`lmhead train --resume ${shell(name)}`} />
        </>
      ) : null}
    </>
  );
}

function Curves({ run }: { run: Run }): JSX.Element {
  const { watch: s } = useStrings().train;
  const [scale, setScale] = useParam("scale", oneOf("linear", ["linear", "log"] as const));
  const [chosen, setChosen] = useParam("at", number(0, 0, 1e12));
  const first = Math.min(run.train[0]?.step ?? run.step, run.valid[0]?.step ?? run.step);
  const viewed = chosen ? Math.min(Math.max(chosen, first), run.step) : run.step;
  const gap = Math.max(1, (run.train[1]?.step ?? 0) - (run.train[0]?.step ?? 0));
  const [train, valid] = [thin(run.train, MAX_POINTS), thin(run.valid, MAX_POINTS)];
  const values = [...train, ...valid].map(({ value }) => value);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const log = scale === "log" && low > 0;
  const margin = log ? 0 : (high - low || 1) * 0.06;
  const across = { label: s.step, domain: [0, Math.max(1, run.step)] as const, show: grouped };
  const sample = at(run.samples, viewed);
  // The last step means "follow the run".
  const look = (step: number): void => setChosen(step + gap > run.step ? 0 : step, true);
  const pairs = ({ step, value }: Point): readonly [number, number] => [step, value];
  const facts: [string, string, Point | undefined, number][] = [
    ["train", s.train, at(run.train, viewed), 4],
    ["valid", s.valid, at(run.valid, viewed), 4],
    ["speed", s.speed, at(run.speed, viewed), 0],
    ["rate", s.rate, at(run.rate, viewed), 6],
  ];
  return (
    <>
      {values.length ? (
        <Chart
          name="loss"
          caption={s.curve}
          summary={fill(s.summary, {
            n: grouped(run.step),
            loss: fixed(run.train.at(-1)?.value ?? NaN, 4),
            valid: fixed(run.valid.at(-1)?.value ?? NaN, 4),
          })}
          x={across}
          y={{
            label: s.loss,
            domain: log ? [low / 1.03, high * 1.03] : [low - margin, high + margin],
            log,
            show: (value) => fixed(value, high - low < 0.5 ? 2 : 1),
          }}
          series={[
            { label: s.train, look: "plain", points: train.map(pairs) },
            { label: s.valid, look: "dots", points: valid.map(pairs) },
          ]}
          guide={viewed}
        >
          <LossTable run={run} />
        </Chart>
      ) : (
        <p class="note">{s.waiting}</p>
      )}
      <div class="controls">
        <Slider
          name="at"
          label={s.look}
          value={viewed}
          low={first}
          high={Math.max(run.step, first + 1)}
          step={gap}
          shown={grouped(viewed)}
          onMove={look}
        />
        <Choice
          name="scale"
          label={s.scale}
          value={scale}
          options={optionsOf(s, "linear", "log")}
          onChoose={setScale}
        />
      </div>
      <dl class="standing here" data-chart="here" data-step={viewed}>
        {facts.map(([key, label, point, digits]) => (
          <div key={key} data-fact={key}>
            <dt>{label}</dt>
            <dd>{point ? (digits ? fixed(point.value, digits) : grouped(Math.round(point.value))) : "—"}</dd>
          </div>
        ))}
      </dl>
      {sample ? (
        <figure class="sample" data-chart="sample">
          <figcaption>{fill(s.sample, { n: grouped(sample.step) })}</figcaption>
          <blockquote dir="auto" tabIndex={0}>
            {sample.text.trim() ? legible(sample.text) : <span class="note">{s.blank_sample}</span>}
          </blockquote>
        </figure>
      ) : null}
      {run.speed.length > 1 ? <Pace run={run} viewed={viewed} /> : null}
    </>
  );
}

function LossTable({ run }: { run: Run }): JSX.Element {
  const { watch: s } = useStrings().train;
  const rows = run.valid.length ? run.valid : thin(run.train, 40);
  return (
    <table class="facts">
      <Heads of={[s.step, s.train, s.valid, s.perplexity]} />
      <tbody>
        {rows.map(({ step }) => {
          const [train, valid] = [at(run.train, step), run.valid.length ? at(run.valid, step) : undefined];
          const loss = valid ?? train;
          return (
            <FactRow
              key={step}
              head={grouped(step)}
              cells={[
                train ? fixed(train.value, 4) : "—",
                valid ? fixed(valid.value, 4) : "—",
                loss ? fixed(Math.exp(loss.value), 2) : "—",
              ]}
            />
          );
        })}
      </tbody>
    </table>
  );
}

function Pace({ run, viewed }: { run: Run; viewed: number }): JSX.Element {
  const { watch: s } = useStrings().train;
  const points = thin(run.speed, MAX_POINTS);
  const max = Math.max(...points.map(({ value }) => value));
  return (
    <Chart
      name="speed"
      caption={s.pace}
      summary={`${s.pace}: ${grouped(Math.round(run.speed.at(-1)?.value ?? 0))}`}
      x={{ label: s.step, domain: [0, Math.max(1, run.step)], show: grouped }}
      y={{
        label: s.speed,
        domain: [0, max * 1.1 || 1],
        show: (value) => (max >= 10_000 && value > 0 ? `${fixed(value / 1000, 0)}k` : grouped(value)),
      }}
      series={[{ label: s.speed, look: "plain", points: points.map(({ step, value }) => [step, value]) }]}
      guide={viewed}
      height={180}
    >
      <table class="facts">
        <Heads of={[s.step, s.speed]} />
        <tbody>
          {thin(run.speed, 40).map(({ step, value }) => (
            <FactRow key={step} head={grouped(step)} cells={[grouped(Math.round(value))]} />
          ))}
        </tbody>
      </table>
    </Chart>
  );
}
