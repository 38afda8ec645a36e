//! Style sheets, scripts and the icon, embedded in the program. Their addresses change with their
//! contents.

use std::sync::LazyLock;

use axum::extract::Path;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use gw_shared::identity::secret::SecretHash;
use gw_shared::text::hexadecimal;

use super::failure::ErrorPage;

struct Asset {
    name: &'static str,
    content_type: &'static str,
    content: &'static str,
}

macro_rules! asset {
    ($name:literal, $path:literal, $content_type:literal) => {
        Asset {
            name: $name,
            content_type: $content_type,
            content: include_str!(concat!("../assets/", $path)),
        }
    };
}

const ASSETS: [Asset; 6] = [
    asset!("console.css", "console.css", "text/css; charset=utf-8"),
    asset!("console.js", "console.js", "text/javascript; charset=utf-8"),
    asset!("icon.svg", "icon.svg", "image/svg+xml"),
    asset!(
        "htmx.js",
        "vendor/htmx.min.js",
        "text/javascript; charset=utf-8"
    ),
    asset!(
        "uplot.js",
        "vendor/uPlot.iife.min.js",
        "text/javascript; charset=utf-8"
    ),
    asset!(
        "uplot.css",
        "vendor/uPlot.min.css",
        "text/css; charset=utf-8"
    ),
];

/// A hash of all assets in their addresses, so that browsers fetch the assets of a new version.
pub(crate) fn version() -> &'static str {
    static VERSION: LazyLock<String> = LazyLock::new(|| {
        let all: String = ASSETS.iter().map(|asset| asset.content).collect();
        hexadecimal(&SecretHash::of(&all).as_bytes()[..8])
    });
    &VERSION
}

pub(crate) async fn serve(Path((asked, name)): Path<(String, String)>) -> Response {
    let Some(asset) = ASSETS.iter().find(|asset| asset.name == name) else {
        return ErrorPage::nothing_here().into_response();
    };
    // Other versions get the current assets, uncached, for a page that is being reloaded.
    let caching = if asked == version() {
        "public, max-age=31536000, immutable"
    } else {
        "no-store"
    };
    (
        [
            (header::CONTENT_TYPE, asset.content_type),
            (header::CACHE_CONTROL, caching),
        ],
        asset.content,
    )
        .into_response()
}
