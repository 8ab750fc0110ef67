// The page holds its numbers as JSON; this hands them out as a file.
"use strict";
(() => {
  document.getElementById("save").addEventListener("click", () => {
    const data = JSON.parse(document.getElementById("data").textContent);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(data, null, 1)], { type: "application/json" }));
    link.download = "report.json";
    link.click();
    URL.revokeObjectURL(link.href);
  });
})();
