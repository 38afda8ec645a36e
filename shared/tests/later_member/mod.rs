//! A member that no version has, in objects that programs store or exchange.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

const NAME: &str = "a_member_of_a_later_version";

/// Writes `value` as JSON, adds the member to each of its objects in turn, and reads it back.
/// Returns the paths (RFC 6901) of the objects that keep the member when they are written again;
/// the others must ignore it. `maps` are the paths of objects whose members are entries of a map or
/// variants of an enum.
pub(crate) fn pass<T: Serialize + DeserializeOwned>(value: &T, maps: &[&str]) -> Vec<String> {
    let plain = serde_json::to_value(value).unwrap();
    let mut paths = Vec::new();
    collect(&plain, "", &mut paths);
    for map in maps {
        assert!(paths.iter().any(|path| path == map), "{map} in {paths:?}");
    }
    paths.retain(|path| !maps.contains(&path.as_str()));
    assert!(!paths.is_empty(), "an object that takes a member: {plain}");
    let is_kept = |path: &String| {
        let mut later = plain.clone();
        let object = later.pointer_mut(path).unwrap().as_object_mut().unwrap();
        object.insert(NAME.into(), json!({"nested": [1, null, "text"]}));
        let read: T = serde_json::from_str(&later.to_string()).unwrap_or_else(|error| {
            panic!("{:?} at {path:?}: {error}", std::any::type_name::<T>())
        });
        let written = serde_json::to_value(&read).unwrap();
        assert!(
            written == plain || written == later,
            "{later} becomes {written}"
        );
        written == later
    };
    paths.into_iter().filter(is_kept).collect()
}

/// Paths of the objects in `value`, the outermost first.
fn collect(value: &Value, path: &str, paths: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            paths.push(path.to_owned());
            for (name, member) in members {
                collect(member, &format!("{path}/{name}"), paths);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                collect(item, &format!("{path}/{index}"), paths);
            }
        }
        _ => {}
    }
}
