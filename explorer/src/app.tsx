// The frame around every page: its name, the way to the others, language and colours.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { models } from "./ask";
import { useAsked } from "./asked";
import { Language, LANGUAGES, preferredLanguage, type Lang } from "./i18n";
import { Models, Version } from "./models";
import { PAGES } from "./pages";
import { Choice } from "./ui/controls";
import { Status } from "./ui/status";
import { change, names, oneOf, text, useAddress, useParam } from "./url";

const FRAME = ["lang", "theme"];

export function App(): JSX.Element {
  useAddress();
  const [lang, setLang] = useParam("lang", oneOf<Lang>(preferredLanguage(), ["en", "zh"]));
  const system = useSystemTheme();
  const [model] = useParam("model", text(""));
  const [theme, setTheme] = useParam("theme", oneOf(system, ["light", "dark"] as const));
  const { strings, tag } = LANGUAGES[lang];
  const asked = useAsked("models", models);
  const given = asked.found?.models;
  const open = PAGES.filter((page) => !page.needsModel || given?.length);
  const page = open.find(({ path }) => path === location.pathname);
  // Until the models are known, a page that needs one is not yet decided; without one it gives way
  // to Learn.
  const shown = page ?? (given ? open[0] : undefined);
  const kept = new URLSearchParams({ lang, theme, ...(model ? { model } : {}) });
  const title = shown && shown.path !== "/" ? `${strings.pages[shown.name]} · lmhead` : strings.title;

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
        <a class="brand" href={`/?${new URLSearchParams({ lang })}`}>
          lmhead
        </a>
        <nav aria-label={strings.frame.pages}>
          {open.length > 1
            ? open.map(({ path, name }) => (
                <a key={path} href={`${path}?${kept}`} aria-current={shown?.path === path ? "page" : undefined}>
                  {strings.pages[name]}
                </a>
              ))
            : null}
        </nav>
        <div class="settings">
          <button
            type="button"
            class="quiet"
            data-do="reset"
            onClick={() => change(Object.fromEntries(names().filter((n) => !FRAME.includes(n)).map((n) => [n, null])))}
          >
            {strings.frame.reset}
          </button>
          <Choice
            name="theme"
            label={strings.frame.theme}
            value={theme}
            options={[["light", strings.frame.light], ["dark", strings.frame.dark]] as const}
            onChoose={(value) => setTheme(value)}
          />
          <Choice
            name="lang"
            label={strings.frame.language}
            value={lang}
            options={[["en", "English"], ["zh", "中文"]] as const}
            onChoose={(value) => setLang(value)}
          />
        </div>
      </header>
      <main id="content" tabIndex={-1}>
        {asked.failed ? <Status asked={asked} waiting="" /> : null}
        <Version.Provider value={asked.found?.lmhead ?? ""}>
          <Models.Provider value={given ?? []}>{shown ? <shown.View key={shown.path} /> : null}</Models.Provider>
        </Version.Provider>
      </main>
      <footer>{strings.frame.offline}</footer>
    </Language.Provider>
  );
}

/** The colours that the machine is set to, now and when that changes. */
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
