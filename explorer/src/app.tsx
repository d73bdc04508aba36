// The frame around every page: menu, model, language and theme.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { fetchModels, type Model } from "./api";
import { fill, Language, LANGUAGES, preferredLanguage, useStrings, type Lang, type Strings } from "./i18n/strings";
import { Models, Version } from "./models";
import { PAGES, type PageInfo } from "./pages";
import { Choice, optionsOf } from "./ui/controls";
import { compact, grouped } from "./ui/format";
import { PageLink } from "./ui/pageLink";
import { Inline } from "./ui/prose";
import { Status } from "./ui/requestStatus";
import { change, currentPath, names, oneOf, replacePath, text, useAddress, useParam } from "./url";
import { useRequest } from "./useRequest";
import { useServerAlive } from "./useServerAlive";

const FRAME = ["lang", "theme", "model"];

export function App(): JSX.Element {
  useAddress();
  const [lang, setLang] = useParam("lang", oneOf<Lang>(preferredLanguage(), ["en", "zh"]));
  const system = useSystemTheme();
  const [named] = useParam("model", text(""));
  const [theme, setTheme] = useParam("theme", oneOf(system, ["light", "dark"] as const));
  const { strings, tag } = LANGUAGES[lang];
  const request = useRequest("models", fetchModels);
  const alive = useServerAlive();
  const [more, setMore] = useState(false);
  const models = request.data?.models;
  const open = PAGES.filter((page) => !page.needsModel || models?.length);
  const path = currentPath();
  const page = path === "/" ? (models ? open[0] : undefined) : PAGES.find((one) => one.path === path);
  const model = models?.find(({ name }) => name === named) ?? models?.[0];
  const title = page ? `${strings.pages[page.name]} · lmhead` : strings.title;

  useEffect(() => {
    if (path === "/" && page) replacePath(page.path);
  }, [path, page]);
  useEffect(() => {
    // On a phone the menu scrolls sideways: show where the reader is.
    const here = document.querySelector<HTMLElement>(".frame nav [aria-current]");
    const menu = here?.parentElement;
    if (here && menu) menu.scrollLeft = here.offsetLeft - menu.offsetLeft - (menu.clientWidth - here.offsetWidth) / 2;
  }, [page, models, lang]);
  useEffect(() => {
    document.documentElement.lang = tag;
    document.documentElement.dataset["theme"] = theme;
    document.title = title;
  }, [tag, theme, title]);

  return (
    <Language.Provider value={lang}>
      <a class="skip" href="#content">
        {strings.skip}
      </a>
      <header class="frame">
        <PageLink path={open[0]?.path ?? "/"} class="brand">
          lmhead
        </PageLink>
        <nav aria-label={strings.frame.pages}>
          {open.map(({ path: to, name }) => (
            <PageLink key={to} path={to} current={page?.path === to}>
              {strings.pages[name]}
            </PageLink>
          ))}
        </nav>
        <button
          type="button"
          class="more"
          aria-expanded={more}
          aria-controls="settings"
          aria-label={strings.frame.settings}
          onClick={() => setMore(!more)}
        >
          ☰
        </button>
        <div class={more ? "settings open" : "settings"} id="settings">
          {model ? <ModelFacts model={model} models={models ?? []} /> : null}
          <button
            type="button"
            class="quiet"
            data-do="reset"
            onClick={() => change(Object.fromEntries(names().flatMap((n) => (FRAME.includes(n) ? [] : [[n, null]]))))}
          >
            {strings.frame.reset}
          </button>
          <Choice
            name="theme"
            label={strings.frame.theme}
            value={theme}
            options={optionsOf(strings.frame, "light", "dark")}
            onChoose={setTheme}
          />
          <Choice
            name="lang"
            label={strings.frame.language}
            value={lang}
            options={
              [
                ["en", "English"],
                ["zh", "中文"],
              ] as const
            }
            onChoose={setLang}
          />
        </div>
        {alive ? null : (
          <p class="gone" role="alert">
            {strings.frame.gone}
          </p>
        )}
      </header>
      <main id="content" tabIndex={-1}>
        {model ? (
          <p class="model-line note" aria-hidden="true">
            {model.name} · {factsOf(model, strings)}
          </p>
        ) : null}
        {request.error ? <Status request={request} waiting="" /> : null}
        {models && named && model && model.name !== named && page?.needsModel ? (
          <p class="banner" role="alert" data-chart="missing-model">
            {fill(strings.frame.missing_model, { model: named, shown: model.name })}
          </p>
        ) : null}
        {lang === "zh" && model && page?.needsModel && !model.languages.includes("zh") ? (
          <NoChinese model={model} models={models ?? []} />
        ) : null}
        <Version.Provider value={request.data?.lmhead ?? ""}>
          <Models.Provider value={models ?? []}>
            <Content page={page} path={path} models={models} />
          </Models.Provider>
        </Version.Provider>
      </main>
      <footer>{strings.frame.offline}</footer>
    </Language.Provider>
  );
}

interface ContentProps {
  readonly page: PageInfo | undefined;
  readonly path: string;
  /** Undefined until the server has answered. */
  readonly models: readonly Model[] | undefined;
}

function Content({ page, path, models }: ContentProps): JSX.Element | null {
  const { frame } = useStrings();
  if (page && (!page.needsModel || models?.length)) return <page.View key={page.path} />;
  if (!models || path === "/") return null;
  return (
    <section class="missing" data-chart="missing">
      <h1>{page ? <Inline text={frame.no_models} /> : fill(frame.missing_page, { path })}</h1>
      <p>
        <PageLink path={PAGES.find((one) => !one.needsModel || models.length)?.path ?? "/learn"}>{frame.home}</PageLink>
      </p>
    </section>
  );
}

function factsOf({ parameters, vocab_size }: Model, { frame }: Strings): string {
  return fill(frame.facts, { parameters: parameters === null ? "?" : compact(parameters), vocab: grouped(vocab_size) });
}

/** The model's name, size and vocabulary; a choice if there are several. */
function ModelFacts({ model, models }: { readonly model: Model; readonly models: readonly Model[] }): JSX.Element {
  const strings = useStrings();
  const { frame: s } = strings;
  return (
    <span class="model" data-chart="model">
      {models.length > 1 ? (
        <select
          name="model"
          aria-label={s.model}
          value={model.name}
          onChange={(event) => change(otherModel(event.currentTarget.value))}
        >
          {models.map(({ name }) => (
            <option key={name} value={name}>
              {name}
            </option>
          ))}
        </select>
      ) : (
        <strong>{model.name}</strong>
      )}
      <small>{factsOf(model, strings)}</small>
    </span>
  );
}

/** Another model; what refers to token ids of this one is dropped. */
function otherModel(name: string): Record<string, string | null> {
  return { model: name, more: null, branches: null, paths: null, target: null, cell: null };
}

function NoChinese({ model, models }: { readonly model: Model; readonly models: readonly Model[] }): JSX.Element {
  const { frame: s } = useStrings();
  const other = models.find(({ languages }) => languages.includes("zh"));
  return (
    <p class="banner" role="status" data-chart="no-chinese">
      <Inline text={fill(s.no_chinese, { model: model.name })} />{" "}
      {other ? (
        <button type="button" onClick={() => change(otherModel(other.name))}>
          {fill(s.use_model, { model: other.name })}
        </button>
      ) : null}
    </p>
  );
}

/** The theme of the operating system, kept up to date. */
function useSystemTheme(): "light" | "dark" {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const [, draw] = useState(0);
  useEffect(() => {
    const again = (): void => draw((n) => n + 1);
    dark.addEventListener("change", again);
    return () => dark.removeEventListener("change", again);
  }, []);
  return dark.matches ? "dark" : "light";
}
