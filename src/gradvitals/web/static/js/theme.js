// Light or dark: as the system asks, unless the reader chose. Runs before the page is drawn, so that nothing flashes.
(() => {
  const key = "gradvitals-theme";
  let kept = null;
  try { kept = localStorage.getItem(key); } catch { /* storage may be turned off */ }
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  window.gradvitalsTheme = {
    isDark() {
      const chosen = document.documentElement.dataset.theme;
      return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    },
    toggle() {
      const next = this.isDark() ? "light" : "dark";
      document.documentElement.dataset.theme = next;
      try { localStorage.setItem(key, next); } catch { /* it then lasts until the page is closed */ }
      window.dispatchEvent(new Event("themechange"));
      return next;
    },
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => window.dispatchEvent(new Event("themechange")));
})();
